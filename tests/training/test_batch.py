"""Rows, weights and micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fakes import random_samples, sample, segment

from engine.config import RoleTraining
from engine.training.batch import Example, Row, batch_size, build, policy_rows, supervised_rows

TRAINING: dict[Any, RoleTraining] = {"agent": RoleTraining(weight=2.0), "designer": RoleTraining()}


def total_weight(batch: Any, kind: int) -> float:
    return float(
        sum(micro["weights"][micro["kind"] == kind].sum(dtype=torch.float64) for micro in batch.micro_batches)
    )


def test_a_sample_is_one_token_mean_over_all_its_segments():
    one = sample(
        "a", segments=[segment([1, 2, 3, 4], [0, 1, 1, 0]), segment([5, 6], [0, 1]), segment([7], [0])]
    )
    rows = policy_rows([one], TRAINING, 8)
    assert [(row.name, int(row.mask.sum())) for row in rows] == [("a/0000", 2), ("a/0001", 1)]
    assert {row.weight for row in rows} == {2.0 / (3 * 8)}


def test_designs_alone_weigh_as_much_as_in_any_other_batch():
    assert batch_size(144, 36, nominal_plays=144) == batch_size(0, 36, nominal_plays=144) == 180
    assert batch_size(100, 36, nominal_plays=144) == 136


def test_the_denominator_counts_plays_that_are_not_sent():
    samples = random_samples(5, seed=1) + random_samples(3, seed=2, role="designer")
    rows = policy_rows(samples, TRAINING, 24)
    batch = build(rows, micro_batch_tokens=100, padding=0)
    assert total_weight(batch, 0) == pytest.approx(2.0 * 5 / 24, rel=1e-6)
    assert total_weight(batch, 1) == pytest.approx(3 / 24, rel=1e-6)


def test_samples_carried_over_do_not_outweigh_their_round():
    rows = policy_rows(random_samples(6, seed=1), TRAINING, 2)
    assert total_weight(build(rows, micro_batch_tokens=100, padding=0), 0) == pytest.approx(2.0, rel=1e-6)


def test_tensors_are_aligned_with_the_token_they_predict():
    one = sample("a", advantage=3.0, segments=[segment([9, 8, 7, 6], [0, 1, 0, 1], [0.0, -1.0, 0.0, -2.0])])
    rows = policy_rows([one], TRAINING, 1)
    longer = Row(
        "z", 0, np.arange(6, dtype=np.int32), np.zeros(6, np.bool_), np.zeros(6, np.float32), 0.0, 0.0
    )
    (micro,) = build([*rows, longer], micro_batch_tokens=100, padding=63).micro_batches
    assert micro["input_ids"][0].tolist() == [9, 8, 7, 6, 63, 63]
    assert micro["attention_mask"][0].tolist() == [1, 1, 1, 1, 0, 0]
    assert micro["mask"][0].tolist() == [True, False, True, False, False]
    assert micro["behaviour"][0].tolist() == [-1.0, 0.0, -2.0, 0.0, 0.0]
    assert micro["advantages"][0].tolist() == [3.0, 0.0, 3.0, 0.0, 0.0]
    assert micro["weights"][0].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_what_was_not_sampled_has_no_log_prob():
    """Nobody promises a number there, and one that is none would spoil the loss of the whole micro-batch."""
    one = sample("a", segments=[segment([9, 8, 7], [0, 0, 1], [0.0, float("nan"), -1.0])])
    (micro,) = build(policy_rows([one], TRAINING, 1), micro_batch_tokens=100, padding=0).micro_batches
    assert micro["behaviour"][0].tolist() == [0.0, -1.0]


def test_supervised_rows_are_a_mean_of_token_means():
    examples = [
        Example(np.arange(4, dtype=np.int32), np.array([False, True, True, True])),
        Example(np.arange(2, dtype=np.int32), np.array([False, True])),
    ]
    batch = build(supervised_rows(examples, 0.1), micro_batch_tokens=100, padding=0)
    assert batch.trained == 0
    assert total_weight(batch, 2) == pytest.approx(0.1, rel=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 200))
def test_packing_keeps_every_row_and_the_bound(lengths: list[int], bound: int):
    rows = [
        Row(f"{index:03d}", 0, np.full(length, index, np.int32), np.zeros(length, np.bool_),
            np.zeros(length, np.float32), 0.0, 0.0)
        for index, length in enumerate(lengths)
    ]  # fmt: skip
    batch = build(rows, micro_batch_tokens=bound, padding=-1)
    for micro in batch.micro_batches:
        assert micro["input_ids"].numel() <= bound or len(micro["input_ids"]) == 1
    found = sorted(int(row[0]) for micro in batch.micro_batches for row in micro["input_ids"])
    assert found == list(range(len(lengths)))
    assert batch.tokens == sum(lengths)
    padding = sum(int((micro["input_ids"] == -1).sum()) for micro in batch.micro_batches)
    assert batch.waste == pytest.approx(padding / batch.padded)


def test_a_micro_batch_may_be_full():
    rows = policy_rows([sample(f"s{index}", tokens=4) for index in range(5)], TRAINING, 5)
    length = len(rows[0].tokens)
    full = build(rows, micro_batch_tokens=5 * length, padding=0)
    assert [len(micro["input_ids"]) for micro in full.micro_batches] == [5]
    less = build(rows, micro_batch_tokens=5 * length - 1, padding=0)
    assert [len(micro["input_ids"]) for micro in less.micro_batches] == [4, 1]


@given(st.integers(2, 5), st.integers(1, 60))
def test_minibatches_divide_no_sample(steps: int, bound: int):
    parts = [segment([index, 2, 3], [0, 1, 1]) for index in range(20)]
    samples = [sample(f"s{index}", segments=parts[2 * index : 2 * index + 2]) for index in range(10)]
    batch = build(
        policy_rows(samples, TRAINING, 10), micro_batch_tokens=bound, padding=0, steps=steps, minibatches=True
    )
    firsts = [
        {int(row[0]) for index in step for row in batch.micro_batches[index]["input_ids"]}
        for step in batch.schedule
    ]
    assert len(firsts) == steps
    assert sorted(first for step in firsts for first in step) == list(range(20))
    assert all((first ^ 1) in step for step in firsts for first in step)


@pytest.mark.parametrize("steps", [2, 3])
def test_each_minibatch_has_its_share_of_every_kind(steps: int):
    samples = random_samples(6, seed=1) + random_samples(12, seed=2, role="designer")
    examples = [
        Example(np.arange(3, dtype=np.int32), np.array([False, True, True])) for _ in range(6 * steps)
    ]
    rows = policy_rows(samples, TRAINING, 18) + supervised_rows(examples, 0.5)
    batch = build(rows, micro_batch_tokens=60, padding=0, steps=steps, minibatches=True)
    for step in batch.schedule:
        kinds = torch.cat([batch.micro_batches[index]["kind"] for index in step])
        assert torch.bincount(kinds, minlength=3).tolist() == [6 // steps, 12 // steps, 6]
