"""Dealing a batch out to ranks: the whole of it, once, equally many micro-batches for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fakes import VOCABULARY, random_samples

from engine.config import LearnerConfig, RoleTraining
from engine.training.batch import Batch, build, policy_rows
from engine.training.command_queue import Closed, RankCommands
from engine.training.loss import Objective, objective_loss
from engine.training.ranks import blank, deal

ROLES: dict[Any, RoleTraining] = {"agent": RoleTraining(), "designer": RoleTraining()}


def batch(rows: int, *, bound: int = 64, steps: int = 1, minibatches: bool = False) -> Batch:
    made = policy_rows(random_samples(rows, seed=rows), ROLES, rows)
    return build(made, micro_batch_tokens=bound, padding=VOCABULARY - 2, steps=steps, minibatches=minibatches)


def rows_of(micro: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    return [
        tuple(ids[: int(present.sum())].tolist())
        for ids, present, mask in zip(micro["input_ids"], micro["attention_mask"], micro["mask"], strict=True)
        if mask.any()
    ]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    ranks=st.integers(2, 5),
    bound=st.sampled_from([30, 64, 200]),
    steps=st.integers(1, 3),
    minibatches=st.booleans(),
)
def test_each_step_is_dealt_out_once_and_evenly(
    rows: int, ranks: int, bound: int, steps: int, minibatches: bool
):
    whole = batch(rows, bound=bound, steps=steps, minibatches=minibatches)
    shares = deal(whole, ranks)
    assert len(shares) == ranks
    assert {share.schedule for share in shares} == {shares[0].schedule}
    assert len(shares[0].schedule) == len(whole.schedule)
    for number, step in enumerate(whole.schedule):
        expected = sorted(row for index in step for row in rows_of(whole.micro_batches[index]))
        found = sorted(
            row
            for share in shares
            for index in share.schedule[number]
            for row in rows_of(share.micro_batches[index])
        )
        assert found == expected
        assert len(shares[0].schedule[number]) == -(-len(step) // ranks)
    assert sum(micro["input_ids"].numel() for share in shares for micro in share.micro_batches) == (
        shares[0].padded
    )
    assert {share.tokens for share in shares} == {whole.tokens}
    assert shares[0].passes == whole.passes


def test_positions_are_dealt_evenly():
    whole = batch(30, bound=30)
    loads = [sum(micro["input_ids"].numel() for micro in share.micro_batches) for share in deal(whole, 4)]
    assert max(loads) - min(loads) <= max(micro["input_ids"].numel() for micro in whole.micro_batches)


def test_a_filler_has_no_loss_and_no_gradient():
    micro = blank(batch(4, bound=1000).micro_batches[0])
    logps = torch.full(tuple(micro["mask"].shape), -1.0, requires_grad=True)
    entropies = torch.ones_like(logps)
    objective = Objective.of(LearnerConfig(kl=0.1, entropy=0.1))
    loss, sums = objective_loss(micro, logps, entropies, objective, reference=logps.detach() - 1.0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logps.grad is not None
    assert not logps.grad.any()
    assert not sums.any()


class Script:
    """Ranks of which the first one says what it is told to."""

    def __init__(self, *commands: tuple[Any, ...]) -> None:
        self.commands = list(commands)

    def receive(self) -> tuple[Any, ...]:
        return self.commands.pop(0)

    def scatter(self, shares: Any) -> Batch:
        assert shares is None
        return batch(3, steps=2)


def test_a_follower_does_what_it_is_told():
    called: list[Any] = []

    class Trainer:
        def load(self, path: str, step: int) -> None:
            called.append((path, step))

    script = Script(("idle",), ("call", "load", ("place", 3)), ("step",), ("close",))
    share = RankCommands(script)  # type: ignore[arg-type]
    share.trainer = Trainer()
    assert [next(share)["part"], next(share)["part"]] == [0, 1]
    assert called == [("place", 3)]
    with pytest.raises(Closed):
        next(share)


def test_a_command_that_nobody_knows_is_an_error():
    with pytest.raises(RuntimeError, match="unknown command"):
        next(RankCommands(Script(("jump", 1))))  # type: ignore[arg-type]
