"""Router replay: a mixture of experts is trained through the experts that the server chose for each token.

Server and trainer round differently, so that a router near a tie chooses other experts, and the log-probs of
the token and of all that follow are those of another computation (arXiv:2510.11370). A router runs as it is,
but for its choice of the top k: the weights of the recorded experts come from its own scores, and so do
gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from engine.errors import ConfigError, SpadeError
from engine.training.batch import MicroBatch
from engine.training.samples import Routes

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_TOP_K = (torch.topk, torch.Tensor.topk)


def routers(model: torch.nn.Module) -> list[tuple[int, Any]]:
    """Return the routers of ``model``, each with the number of its layer, in order."""
    return [
        (int(place[1]), module)
        for name, module in model.named_modules()
        if hasattr(module, "top_k")
        and hasattr(module, "num_experts")
        and isinstance(getattr(module, "weight", None), torch.nn.Parameter)
        and (place := _LAYER.search(name))
    ]


def routes_of(model: Any) -> Routes:
    """Return the sizes of what servers tell of a token of ``model``. Raises ConfigError for a dense one."""
    found = routers(model)
    if not found:
        raise ConfigError(
            f"learner.router_replay = true: {type(model).__name__} has no router of experts",
            where="learner.router_replay",
            remedy="It is for mixtures of experts: set it to false.",
        )
    layers = int(model.config.get_text_config().num_hidden_layers)
    return Routes(layers, int(found[0][1].top_k), int(found[0][1].num_experts))


class RouterReplay:
    """The recorded experts of the micro-batch in hand, which the routers of the added models choose.

    ``counts`` sums up, over layers and recorded tokens, how many choices differ from the router's own, and
    all of them: those of the forward passes of the policy.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(2, dtype=torch.float64)
        self._recorded: torch.Tensor | None = None
        self._counting = False

    def add(self, model: torch.nn.Module) -> None:
        """Let the routers of ``model`` replay."""
        for layer, router in routers(model):
            router.forward = partial(self._route, layer, router, router.forward)

    @contextmanager
    def replaying(self, micro: MicroBatch, device: torch.device) -> Iterator[None]:
        """Replay the experts of ``micro`` in all passes over it, those of checkpointed layers too."""
        experts = micro.get("experts")
        self._recorded = None if experts is None else experts.flatten(0, 1).to(device)
        try:
            yield
        finally:
            self._recorded = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Compare the choices of this pass with the recorded ones."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def _route(
        self, layer: int, router: Any, forward: Callable[..., Any], *positional: Any, **named: Any
    ) -> Any:
        if self._recorded is None:
            return forward(*positional, **named)
        choice = _Choice(router, self._recorded[:, layer].long())
        with choice:
            found = forward(*positional, **named)
        if choice.counts is None:
            raise SpadeError(
                f"{type(router).__name__} does not choose its {router.top_k} experts by topk",
                remedy="Set learner.router_replay to false for this model.",
            )
        if self._counting:
            self.counts = self.counts.to(choice.counts.device) + choice.counts
        return found


class _Choice(TorchFunctionMode):
    """Has a router choose the ``recorded`` experts (tokens, top-k); where they are -1, its own."""

    def __init__(self, router: Any, recorded: torch.Tensor) -> None:
        super().__init__()
        self._router, self._recorded = router, recorded
        self.counts: torch.Tensor | None = None

    def __torch_function__(
        self, function: Any, types: Any, positional: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        found = function(*positional, **(named or {}))
        if function not in _TOP_K or found.indices.shape != self._recorded.shape:
            return found  # some routers choose groups of experts first
        if positional[0].shape[-1] != self._router.num_experts:
            return found
        own, known = found.indices, self._recorded[:, :1] >= 0
        chosen = torch.where(known, self._recorded, own)
        other = (own.sort(-1).values != chosen.sort(-1).values).any(-1, keepdim=True)
        self.counts = torch.stack([other.sum(), known.sum()]).double()
        return torch.return_types.topk((positional[0].gather(-1, chosen), chosen))
