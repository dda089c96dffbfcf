"""Router replay: the trainer computes through the recorded experts, with its own weights and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_fakes import VOCABULARY, random_samples, sample, sampled
from scenes.tiny_models import MIXTURES, write_model

from bus import codec
from bus.messages import EpisodeSample, Segment, Span
from engine.config import LearnerConfig, OptimizerConfig, RoleTraining
from engine.errors import ConfigError, SpadeError
from engine.inference.completion import Completion
from engine.inference.segments import SegmentBuilder, make_segment
from engine.running.model_check import check_here
from engine.training.batch import Batch, build, policy_rows
from engine.training.router_replay import RouterReplay, routers, routes_of
from engine.training.samples import CreditedSample, Routes, arrays, fault

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
FROZEN = OptimizerConfig(learning_rate=0.0)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@contextmanager
def watched(model: Any) -> Iterator[dict[int, torch.Tensor]]:
    """The experts (tokens, top-k) that each layer was given in the last pass."""
    seen: dict[int, torch.Tensor] = {}
    blocks = {name.rpartition(".")[0]: layer for name, layer in named_routers(model).items()}
    hooks = [
        model.get_submodule(f"{block}.experts").register_forward_pre_hook(
            lambda _, given, layer=layer: seen.update({layer: given[1].detach().clone()})
        )
        for block, layer in blocks.items()
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def named_routers(model: Any) -> dict[str, int]:
    found = {id(module): layer for layer, module in routers(model)}
    return {name: found[id(module)] for name, module in model.named_modules() if id(module) in found}


@torch.no_grad()
def played(model: Any, one: Segment, routes: Routes) -> Segment:
    """``one`` with the log-probs and the experts of ``model``, as a server returns them."""
    tokens, mask, _ = arrays(one)
    with watched(model) as seen:
        logits = model(input_ids=torch.tensor(tokens.astype(np.int64))[None]).logits[0, :-1]
    logps = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:].astype(np.int64))[:, None])[:, 0]
    experts = np.zeros((len(tokens), routes.layers, routes.top_k), np.uint8)  # vLLM: 0 in dense layers
    for layer, chosen in seen.items():
        experts[:, layer] = chosen.numpy()
    return make_segment(tokens.tolist(), logps.numpy()[mask[1:]].tolist(), one.spans, experts[:-1].tobytes())


def sampled_by(model: Any, count: int = 8) -> list[CreditedSample]:
    return [
        sample(
            one.sample,
            advantage=one.credit.advantage,
            segments=[played(model, one.segments[0], routes_of(model))],
        )
        for one in random_samples(count, seed=1)
    ]


def batch(samples: list[CreditedSample], routes: Routes | None) -> Batch:
    rows = policy_rows(samples, {"agent": RoleTraining()}, len(samples), routes=routes)
    return build(rows, micro_batch_tokens=60, padding=VOCABULARY - 2)


def mixture(folder: Path, architecture: str) -> Path:
    """A model whose experts differ much and whose routers are near a tie, so that roundings could decide."""
    return with_routers(write_model(folder, architecture, initializer_range=0.2), folder, 0.02, 0.0)


def perturbed(folder: Path, architecture: str, tmp_path: Path) -> Path:
    """The model of ``folder`` with routers that give almost the same weights, and choose other experts."""
    return with_routers(folder, write_model(tmp_path / "perturbed", architecture), 1.0, 0.2)


def with_routers(source: Path, target: Path, scale: float, noise: float) -> Path:
    model = load(source)
    torch.manual_seed(2)
    with torch.no_grad():
        for _, router in routers(model):
            router.weight *= scale
            router.weight += noise * router.weight.std() * torch.randn(router.weight.shape)
    model.save_pretrained(target)
    return target


def differences(model: Any, samples: list[CreditedSample]) -> tuple[float, float]:
    """Return the mismatch of ``model``: the deviation of its ratios, and the share of other choices."""
    ratios, differ, compared = list[float](), 0, 0
    for one in samples:
        (part,), routes = one.segments, routes_of(model)
        own = played(model, part, routes)
        ratios += np.expm1(np.frombuffer(own.logprobs, "<f4") - np.frombuffer(part.logprobs, "<f4")).tolist()
        mine, theirs = (np.sort(routes.read(each)[:-1], -1) for each in (own, part))
        layers = [layer for layer, _ in routers(model)]
        other = (mine != theirs).any(-1)[:, layers]
        differ, compared = differ + int(other.sum()), compared + other.size
    return float(np.std(ratios)), differ / compared


@pytest.mark.timeout(150)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_recorded_experts_give_the_samplers_log_probs(
    architecture: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    """The reference replays as well: before the first step nothing lies between it and the policy."""
    folder = mixture(tmp_path / "model", architecture)
    check_here(folder, LearnerConfig(router_replay=True))
    model, other = load(folder), perturbed(folder, architecture, tmp_path)
    samples = sampled_by(model)
    deviation, mismatch = differences(load(other), samples)
    learner = LearnerConfig(optimizer=FROZEN, kl=0.1, router_replay=True)
    with start(learner, model=other) as running:
        found = running.step(batch(samples, routes_of(model)))
    print(architecture, deviation, mismatch, found["ratio_deviation"], found["router_mismatch"])
    assert mismatch > 0.02
    assert found["router_mismatch"] == pytest.approx(
        mismatch, rel=0.3
    )  # a choice moves those of later layers
    assert found["ratio_deviation"] < deviation / 4
    assert found["kl"] == pytest.approx(0.0, abs=1e-6)
    with start(LearnerConfig(optimizer=FROZEN, router_replay=True), model=folder) as running:
        found = running.step(batch(samples, routes_of(model)))
    assert found["router_mismatch"] == 0.0
    assert found["ratio_deviation"] < 1e-4


def test_gradients_flow_through_the_recorded_experts(start: Callable[..., Any], tmp_path: Path) -> None:
    """Also where layers are computed again in the backward pass, and over several steps of minibatches."""
    folder = mixture(tmp_path / "model", "qwen3_moe")
    model, other = load(folder), perturbed(folder, "qwen3_moe", tmp_path)
    samples, routes, weights = sampled_by(model), routes_of(model), {}
    for again in (False, True):
        learner = LearnerConfig(
            optimizer=OptimizerConfig(learning_rate=1e-3), router_replay=True, gradient_checkpointing=again
        )
        with start(learner, model=other) as running:
            found = running.step(batch(samples, routes))
            weights[again] = running.call(running.trainer.weights)
    before = load(other).state_dict()
    for name, one in weights[True].items():
        torch.testing.assert_close(one, weights[False][name])
        assert "gate.weight" not in name or not torch.equal(one, before[name])
    assert found["router_mismatch"] > 0

    # The gradient of a router is that of the log-probs through the recorded experts.
    trained, replay = load(other), RouterReplay()
    replay.add(trained)
    micro = batch(samples, routes).micro_batches[0]
    weight = routers(trained)[0][1].weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))

    def total() -> torch.Tensor:
        with replay.replaying(micro, torch.device("cpu")):
            logits = trained(input_ids=micro["input_ids"], attention_mask=micro["attention_mask"]).logits
        logps = torch.log_softmax(logits[:, :-1].double(), -1)
        found = logps.gather(-1, micro["input_ids"][:, 1:, None])[..., 0]
        return (found * micro["mask"]).sum()

    trained.zero_grad()
    total().backward()
    slope = float((weight.grad * direction).sum())
    with torch.no_grad():
        ends = []
        for step in (1e-2, -2e-2):
            weight.add_(step * direction)
            ends.append(float(total()))
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=0.05)


def test_minibatches_replay_in_the_first_look_at_the_rows_of_later_steps(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    folder = mixture(tmp_path / "model", "qwen3_moe")
    model, other = load(folder), perturbed(folder, "qwen3_moe", tmp_path)
    rows = policy_rows(sampled_by(model), {"agent": RoleTraining()}, 8, routes=routes_of(model))
    two = build(rows, micro_batch_tokens=60, padding=VOCABULARY - 2, steps=2, minibatches=True)
    learner = LearnerConfig(optimizer=FROZEN, steps_per_batch=2, minibatches=True, router_replay=True)
    with start(learner, model=other) as running:
        found = running.step(two)
    assert found["clip_fraction"] == 0.0
    assert 0.01 < found["router_mismatch"] < 0.5
    proximal = torch.cat([(one["proximal"] - one["behaviour"])[one["mask"]] for one in two.micro_batches])
    assert proximal.abs().max() < 0.1


def test_a_dense_model_and_an_unknown_router_are_refused(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no router of experts") as caught:
        check_here(policy, LearnerConfig(router_replay=True))
    assert caught.value.where == "learner.router_replay"
    model = load(write_model(tmp_path, "qwen3_moe"))
    _, router = routers(model)[0]
    router.forward = lambda hidden: (hidden, *hidden.sort(-1))  # chooses in another way
    replay = RouterReplay()
    replay.add(model)
    recorded = {"experts": torch.zeros(1, 4, 2, 2, dtype=torch.int16)}
    with replay.replaying(recorded, torch.device("cpu")), pytest.raises(SpadeError, match="by topk"):
        model(input_ids=torch.tensor([[1, 2, 3, 4]]))


def test_experts_travel_with_the_tokens_that_they_belong_to() -> None:
    routes, chooser = Routes(layers=3, top_k=2, experts=300), np.random.default_rng(1)

    def completion(builder: SegmentBuilder, count: int) -> Completion:
        """Return what a server does: the experts of all tokens but those that are known and the last one."""
        rows = chooser.integers(0, 300, size=(len(builder) + count - 1 - builder.routed, 3, 2))
        spans, tokens = (Span(1, 0, count),), list(range(count))
        return Completion(tokens, [-1.0] * count, spans, "stop", experts=rows.astype(np.uint16))

    builder = SegmentBuilder()
    assert builder.routed == 0
    builder.prompt([5, 6, 7])
    first = completion(builder, 4)
    builder.completion(first)
    assert builder.routed == 6
    builder.prompt([8, 9])
    second = completion(builder, 2)
    builder.completion(second)
    builder.prompt([1])
    builder.rewrite([4, 4])
    third = completion(builder, 3)
    builder.completion(third)
    message = EpisodeSample(episode="e", round=0, segments=builder.segments())
    _, read = codec.decode(codec.encode(message, run="t", role="agent", instance="a"))
    assert read == message
    one, two = (routes.read(segment) for segment in read.segments)
    np.testing.assert_array_equal(one[:-1], np.concatenate([first.experts, second.experts]))
    np.testing.assert_array_equal(two[:-1], third.experts)
    assert (one[-1] == -1).all()
    assert fault(message, 64, routes) is None


@pytest.mark.parametrize(
    ("experts", "verdict"),
    [(b"", None), (b"\x01" * 20, None), (b"\x01" * 19, "malformed"), (b"\x09" * 20, "malformed")],
)
def test_experts_that_do_not_fit_are_not_trained_and_none_are_the_trainers_own(
    experts: bytes, verdict: str | None
) -> None:
    routes = Routes(layers=2, top_k=2, experts=8)
    segment = make_segment([1, 2, 3, 4, 5, 6], [-1.0, -1.0], [Span(0, 4, 6)], experts)
    assert fault(sampled(sample("x", segments=[segment])), VOCABULARY, routes) == verdict
    assert fault(sampled(sample("x", segments=[segment])), VOCABULARY) is None
    if not experts:
        assert (routes.read(segment) == -1).all()
