"""Figures and intervals."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.evals import statistics
from engine.evals.statistics import Estimate


@pytest.mark.parametrize(("right", "samples", "k"), [(0, 5, 3), (1, 5, 3), (3, 5, 2), (5, 5, 4), (2, 4, 4)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(right: int, samples: int, k: int) -> None:
    draws = list(itertools.combinations([1] * right + [0] * (samples - right), k))
    assert statistics.pass_at(right, samples, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_figures_of_a_suite() -> None:
    found = statistics.figures({"a": [1, 1, 1, 1], "b": [0, 0, 0, 1], "c": [0, 0, 0, 0]})
    assert (found.items, found.samples) == (3, 12)
    assert found.mean.value == pytest.approx(5 / 12)
    assert found.pass_at == pytest.approx({1: 5 / 12, 2: 0.5, 4: 2 / 3})
    assert found.mean.low <= found.mean.value <= found.mean.high


def test_the_interval_draws_items_and_not_samples() -> None:
    rng = random.Random(1)
    once = {str(item): [float(rng.random() < 0.5)] for item in range(60)}
    copied = {item: values * 50 for item, values in once.items()}
    assert statistics.figures(copied).mean == statistics.figures(once).mean


def test_the_interval_covers_the_truth_in_about_95_of_100_evaluations() -> None:
    rng = random.Random(5)
    covered = 0
    for _ in range(400):
        estimate = statistics.interval([float(rng.random() < 0.3) for _ in range(80)])
        covered += estimate.low <= 0.3 <= estimate.high
    assert 360 <= covered <= 396


def test_where_all_items_agree_the_interval_is_wilsons() -> None:
    assert statistics.interval([0.0] * 12) == Estimate(0.0, 0.0, pytest.approx(0.2425, abs=1e-3))
    assert statistics.interval([1.0]).low == pytest.approx(0.2065, abs=1e-3)


def test_a_paired_difference_is_narrower_than_two_intervals() -> None:
    rng = random.Random(2)
    easy = {str(item): rng.random() for item in range(100)}
    before = {item: [float(rng.random() < ease)] * 4 for item, ease in easy.items()}
    after = {item: [min(1.0, values[0] + 0.1)] * 4 for item, values in before.items()}
    found = statistics.difference(before, after | {"other": [1.0]})
    assert found is not None
    assert (found.items, found.left_out) == (100, 1)
    single = statistics.figures(before).mean
    assert found.mean.high - found.mean.low < (single.high - single.low) / 3
    assert statistics.difference({"a": [1.0]}, {"b": [1.0]}) is None
