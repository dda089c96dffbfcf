"""The figures of an evaluation."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.evals.records import Sample
from roles.evaluator.score import score


def played(group: str, value: float, versions: tuple[int, int] | None) -> Sample:
    return Sample(suite="s", policy="model", item="i", group=group, sample=0, score=value, versions=versions)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=50))
def test_mean_and_standard_error(returns: list[float]) -> None:
    total = score([played("a", value, (3, 4)) for value in returns], 9)
    assert total.episodes == len(returns)
    assert total.win == pytest.approx(statistics.fmean(returns), abs=1e-12)
    assert total.stderr == pytest.approx(statistics.stdev(returns) / len(returns) ** 0.5, abs=1e-9)


def test_known_numbers() -> None:
    total = score([played("a", 1.0, (2, 2)), played("a", 0.0, (2, 3)), played("b", 1.0, None)], 9)
    assert total.win == pytest.approx(2 / 3)
    assert total.stderr == pytest.approx((1 / 3) ** 0.5 / 3**0.5)
    assert total.by_family == {"a": 0.5, "b": 1.0}
    assert (total.low, total.high) == (2, 3)


def test_one_episode_has_no_spread_and_none_no_score() -> None:
    assert score([played("a", 0.5, None)], 9)[1:] == (0.5, 0.0, {"a": 0.5}, 9, 9)
    with pytest.raises(ValueError, match="without episodes"):
        score([], 0)
