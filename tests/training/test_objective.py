"""The objective against a plain numpy computation, one token at a time, and what may not change it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fakes import random_samples

from engine.config import DesignerTraining, ImportanceMode, LearnerConfig, RoleTraining
from engine.training.batch import Batch, Example, MicroBatch, build, policy_rows, supervised_rows
from engine.training.loss import SUMS, Objective, metrics, objective_loss
from engine.training.samples import CreditedSample

LEARNER = LearnerConfig(
    agent=RoleTraining(weight=0.7, clip_low=0.1),
    designer=DesignerTraining(weight=1.3, clip_high=0.5, importance_cap=1.5),
    clip_low=0.2,
    clip_high=0.25,
    importance_cap=1.2,
    kl=0.3,
    entropy=0.02,
)
SIZE = 12
few = settings(max_examples=40)


def with_modes(agent: str, designer: str) -> LearnerConfig:
    change = msgspec.structs.replace
    return change(
        LEARNER,
        importance_mode=agent,
        designer=change(LEARNER.designer, importance_mode=designer),
    )


def plain_weight(log_ratios: Sequence[float], mode: str, cap: float) -> list[float]:
    """The importance weights of one row's sampled tokens."""
    level, action = mode.split("_")
    if level == "sequence":
        log_ratios = [sum(log_ratios)] * len(log_ratios)
    if level == "geometric":
        log_ratios = [sum(log_ratios) / len(log_ratios)] * len(log_ratios)
    ratios = [math.exp(value) for value in log_ratios]
    return [min(r, cap) if action == "truncate" else (r if r <= cap else 0.0) for r in ratios]


def plain_loss(
    micro: dict[str, Any], logps: Any, entropies: Any, reference: Any, learner: LearnerConfig
) -> float:
    """The definition, token by token, in double precision."""
    total = 0.0
    for row in range(len(logps)):
        columns = np.flatnonzero(micro["mask"][row])
        kind = ("agent", "designer", "supervised")[int(micro["kind"][row])]
        weights = micro["weights"][row][columns]
        now = logps[row][columns]
        if kind == "supervised":
            total -= float(weights @ now)
            continue
        role = learner.agent if kind == "agent" else learner.designer
        low, high = role.clip_low or learner.clip_low, role.clip_high or learner.clip_high
        cap, mode = (
            role.importance_cap or learner.importance_cap,
            role.importance_mode or learner.importance_mode,
        )
        start = micro["proximal"][row][columns] if "proximal" in micro else now
        correction = plain_weight(list(start - micro["behaviour"][row][columns]), mode, cap)
        for i, column in enumerate(columns):
            ratio = math.exp(now[i] - start[i])
            advantage = micro["advantages"][row][column]
            gain = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            away = reference[row][column] - now[i]
            k3 = (math.exp(away) - away - 1) * ratio
            value = -correction[i] * gain + learner.kl * k3 - learner.entropy * entropies[row][column]
            total += weights[i] * value
    return total


def samples(seed: int) -> list[CreditedSample]:
    return [*random_samples(5, seed=seed), *random_samples(3, seed=seed + 1, role="designer")]


def batch_of(some: Sequence[CreditedSample], bound: int = 10_000, padding: int = 0, **steps: Any) -> Batch:
    roles: dict[Any, RoleTraining] = {"agent": LEARNER.agent, "designer": LEARNER.designer}
    text = Example(np.arange(7, dtype=np.int32), np.array([False] + [True] * 6))
    rows = policy_rows(some, roles, SIZE) + supervised_rows([text], 0.2)
    return build(rows, micro_batch_tokens=bound, padding=padding, **steps)


def made_up(micro: MicroBatch, spread: float = 0.4) -> dict[str, torch.Tensor]:
    """Log-probs, entropies and reference of each token, as a function of the token and its place alone."""
    ids = micro["input_ids"].double()
    place = torch.arange(ids.shape[1] - 1)[None]
    wave = torch.sin(ids[:, 1:] * 12.9898 + ids[:, :-1] * 7.233 + place)
    behaviour = torch.where(micro["behaviour"] < 0, micro["behaviour"].double(), -3.0)
    return {
        "logps": (behaviour + spread * wave).float(),
        "entropies": 1.5 + 0.5 * wave.float(),
        "reference": (behaviour + spread * torch.cos(wave * 5)).float(),
        "proximal": (behaviour + spread * torch.sin(wave * 3)).float(),
    }


def total(
    batch: Batch, learner: LearnerConfig = LEARNER, *, proximal: bool = True
) -> tuple[float, dict[str, float]]:
    """The loss of a whole batch and its metrics, micro-batch by micro-batch."""
    loss, sums = 0.0, torch.zeros(len(SUMS), dtype=torch.float64)
    for micro in batch.micro_batches:
        fakes = made_up(micro)
        given_ = micro | ({"proximal": fakes["proximal"]} if proximal else {})
        one, statistics = objective_loss(
            given_, fakes["logps"], fakes["entropies"], Objective.of(learner), reference=fakes["reference"]
        )
        loss += float(one)
        sums += statistics
    return loss, metrics(sums.tolist())


@pytest.mark.parametrize("proximal", [False, True])
@pytest.mark.parametrize("agent", get_args(ImportanceMode))
def test_every_mode_is_the_plain_computation(agent: str, proximal: bool):
    """The designer has another mode than the agent in each case."""
    modes = get_args(ImportanceMode)
    learner = with_modes(agent, modes[(modes.index(agent) + 1) % len(modes)])
    (micro,) = batch_of(samples(3)).micro_batches
    fakes = made_up(micro)
    ours, _ = total(batch_of(samples(3)), learner, proximal=proximal)
    arrays = {name: tensor.double().numpy() for name, tensor in (micro | fakes).items()}
    given_ = {name: value for name, value in arrays.items() if proximal or name != "proximal"}
    plain = plain_loss(given_, arrays["logps"], arrays["entropies"], arrays["reference"], learner)
    assert ours == pytest.approx(plain, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("proximal", [False, True])
def test_the_parts_add_up_to_the_loss(proximal: bool):
    loss, parts = total(batch_of(samples(3)), proximal=proximal)
    assert parts["loss"] == pytest.approx(loss, rel=1e-5)


def test_what_is_cut_is_counted_by_the_cap_of_its_role():
    (micro,) = batch_of(samples(3)).micro_batches
    ratio = torch.exp(made_up(micro)["proximal"] - micro["behaviour"])
    designer = msgspec.structs.replace(LEARNER.designer, importance_cap=1.05)
    _, found = total(batch_of(samples(3)), msgspec.structs.replace(LEARNER, designer=designer))
    for kind, (role, cap) in enumerate((("agent", 1.2), ("designer", 1.05))):
        of_role = micro["mask"] & (micro["kind"] == kind)[:, None]
        expected = float((ratio[of_role] > cap).float().mean())
        assert 0 < expected == pytest.approx(found[f"capped_fraction_{role}"])


@few
@given(seed=st.integers(0, 2**32), bound=st.integers(1, 200), padding=st.integers(0, 60))
def test_order_padding_and_micro_batches_change_nothing(seed: int, bound: int, padding: int):
    some = samples(seed % 1000)
    whole, known = total(batch_of(some))
    order = np.random.default_rng(seed).permutation(len(some))
    again, found = total(batch_of([some[i] for i in order], bound, padding))
    assert again == pytest.approx(whole, rel=1e-4, abs=1e-5)
    assert found == pytest.approx(known, rel=1e-4, abs=1e-5)


@few
@given(scale=st.floats(0.01, 50), seed=st.integers(0, 100))
def test_the_policy_term_grows_with_the_scale_of_the_advantage(scale: float, seed: int):
    some = samples(seed)
    scaled = [
        one._replace(credit=msgspec.structs.replace(one.credit, advantage=one.credit.advantage * scale))
        if one.role == "designer"
        else one
        for one in some
    ]
    _, before = total(batch_of(some))
    _, after = total(batch_of(scaled))
    assert after["loss_designer"] == pytest.approx(scale * before["loss_designer"], rel=1e-4, abs=1e-7)
    for name in (
        "loss_agent",
        "loss_supervised",
        "loss_kl",
        "loss_entropy",
        "clip_fraction",
        "capped_fraction",
    ):
        assert after[name] == pytest.approx(before[name], rel=1e-5, abs=1e-9)


@few
@given(
    agents=st.integers(0, 6),
    designers=st.integers(0, 6),
    steps=st.integers(1, 4),
    minibatches=st.booleans(),
    bound=st.integers(1, 150),
)
def test_the_weights_of_a_role_add_up(agents: int, designers: int, steps: int, minibatches: bool, bound: int):
    """In every pass over the batch a role weighs its weight times its share of B."""
    some = [*random_samples(agents, seed=1), *random_samples(designers, seed=2, role="designer")]
    batch = batch_of(some, bound, steps=steps, minibatches=minibatches)
    taken = len(batch.schedule)
    for kind, expected in enumerate((0.7 * agents / SIZE, 1.3 * designers / SIZE, 0.2)):
        weight = sum(
            float(batch.micro_batches[index]["weights"][batch.micro_batches[index]["kind"] == kind].sum())
            for step in batch.schedule
            for index in step
        )
        assert weight / taken == pytest.approx(expected, rel=1e-5)


@few
@given(steps=st.integers(2, 5), seed=st.integers(0, 50))
def test_minibatches_are_shares_of_the_batch(steps: int, seed: int):
    """Their mean loss is that of the batch, and no sample is divided or seen twice."""
    some = samples(seed)
    whole, known = total(batch_of(some))
    parted = batch_of(some, steps=steps, minibatches=True)
    assert len(parted.schedule) == steps
    assert parted.passes == 1
    losses, found = total(parted)
    assert losses / steps == pytest.approx(whole, rel=1e-4, abs=1e-5)
    assert found["ratio_mean"] == pytest.approx(known["ratio_mean"], rel=1e-5)
    counts = [sum(len(parted.micro_batches[i]["kind"]) for i in step) for step in parted.schedule]
    assert max(counts) - min(counts) <= 1


def test_passes_take_the_whole_batch_again():
    batch = batch_of(samples(1), bound=30, steps=3)
    assert batch.schedule == (tuple(range(len(batch.micro_batches))),) * 3
    assert batch.passes == 3
    assert batch_of(samples(1), bound=30).passes == 1


def test_fewer_samples_than_minibatches_take_fewer_steps():
    batch = build(
        policy_rows(random_samples(2, seed=1), {"agent": RoleTraining()}, 2),
        micro_batch_tokens=100,
        padding=0,
        steps=4,
        minibatches=True,
    )
    assert [len(step) for step in batch.schedule] == [1, 1]
