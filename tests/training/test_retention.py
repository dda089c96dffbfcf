"""Which checkpoints stay: the best by a metric or by a suite, and those whose score is still to come."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.lineage import Lineage, Version
from engine.training.retention import Best, Retention, read_best, write_best


def name(step: int, fence: int = 0) -> str:
    return f"{fence:06d}-{step:010d}-{step * 7:012d}"


def scored(retention: Retention, low: int, high: int, score: float, there: list[str], fence: int = 0) -> bool:
    return retention.scored(Version(fence, low), Version(fence, high), score, there)


def test_without_a_measure_nothing_is_spared():
    retention = Retention("", every=10)
    assert not retention.saved(name(10), {"loss": 1.0})
    assert retention.spared() == frozenset()
    assert retention.suite == retention.metric == ""


def test_the_highest_or_the_lowest_of_a_metric():
    for by, best in (("metric:reward", 2), ("metric:-reward", 3)):
        retention = Retention(by)
        assert (retention.metric, retention.suite) == ("reward", "")
        for step, value in ((1, 0.2), (2, 0.9), (3, 0.1), (4, 0.5)):
            retention.saved(name(step), {"reward": value})
        assert retention.best is not None
        assert retention.best.checkpoint == name(best)
        assert retention.spared() == {name(best)}
    assert not retention.saved(name(5), {})
    assert not retention.saved(name(6), {"reward": -math.inf})
    assert not retention.saved(name(7), {"reward": math.nan})


def test_a_checkpoint_waits_for_its_score():
    retention = Retention("mid", every=10)
    for step in range(1, 15):
        assert not retention.saved(name(step), {})
    assert retention.spared() == {name(10)}
    there = [name(step) for step in (14, 13, 10)]
    assert scored(retention, 10, 10, 0.4, there)
    assert retention.best == Best(name(10), 0.4, "mid", version=10)
    for step in range(15, 21):
        retention.saved(name(step), {})
    assert retention.spared() == {name(10), name(20)}
    assert not scored(retention, 20, 21, 0.3, [name(21), name(20), name(10)])
    assert retention.spared() == {name(10)}
    assert scored(retention, 30, 30, 0.5, [name(30), name(10)])
    assert retention.spared() == {name(30)}


def test_a_score_belongs_to_who_answered_or_to_the_nearest():
    def found(low: int, high: int, there: list[str]) -> str | None:
        retention = Retention("mid", every=10)
        scored(retention, low, high, 0.5, there)
        return retention.best.checkpoint if retention.best else None

    assert found(11, 13, [name(10), name(12), name(20)]) == name(12)
    assert found(11, 11, [name(10), name(20)]) == name(10)
    assert found(16, 16, [name(10), name(20)]) == name(20)
    assert found(30, 30, [name(10), name(20)]) is None


def test_a_score_is_of_the_step_on_the_surviving_path_whoever_trained_it():
    """The checkpoint of step 10 was written in the first life and evaluated in the second."""
    retention = Retention("mid", every=10)
    there = [name(10), name(9)]
    retention.settle(Lineage().fork(1, 10))
    assert scored(retention, 10, 11, 0.4, there, fence=1)
    assert retention.best is not None
    assert retention.best.checkpoint == name(10)
    assert scored(retention, 20, 20, 0.5, [name(20, 1), name(10)], fence=1)
    assert retention.best.checkpoint == name(20, 1)


def test_the_score_of_abandoned_weights_is_no_score():
    retention = Retention("mid", every=10)
    retention.settle(Lineage().fork(1, 16))
    assert not scored(retention, 20, 20, 0.9, [name(16)])
    assert not scored(retention, 16, 17, 0.9, [name(16)])
    assert not scored(retention, 20, 20, 0.9, [name(20), name(16)]), "its own checkpoint is of a dead branch"
    assert scored(retention, 16, 16, 0.1, [name(20), name(16)])
    assert retention.best == Best(name(16), 0.1, "mid", version=16)
    assert scored(retention, 19, 19, 0.2, [name(20), name(16)], fence=1), "20 is nearer, and gone"
    assert retention.best.checkpoint == name(16)


def test_the_best_goes_with_the_weights_it_was_judged_by():
    """The suite was played at step 20, the nearest checkpoint was that of 16, where the learner forked."""
    retention = Retention("mid", every=10)
    scored(retention, 20, 20, 0.9, [name(16)])
    assert retention.best is not None
    again = Retention("mid", every=10, best=retention.best)
    assert not again.settle(Lineage())
    assert not again.settle(Lineage().fork(1, 20))
    assert again.settle(Lineage().fork(1, 20).fork(2, 16))
    assert again.best is None
    assert not again.settle(Lineage().fork(1, 20).fork(2, 16)), "it is told once"
    older = Retention("metric:reward", best=Best(name(16), 0.9, "metric:reward"))
    assert not older.settle(Lineage().fork(1, 16))
    assert older.settle(Lineage().fork(1, 15))


def test_what_waits_on_an_abandoned_branch_waits_no_more():
    retention = Retention("mid", every=10)
    for step in (10, 20):
        retention.saved(name(step), {})
    retention.settle(Lineage().fork(1, 15))
    assert retention.spared() == {name(10)}


@given(st.lists(st.tuples(st.sampled_from(["save", "score"]), st.integers(0, 60)), max_size=60))
def test_few_are_spared_and_the_best_is_the_best_that_was_there(steps: list[tuple[str, int]]):
    retention = Retention("mid", every=5)
    scores: dict[str, float] = {}
    for kind, step in steps:
        if kind == "save":
            retention.saved(name(step), {})
        else:
            score = math.sin(step)
            scored(retention, step, step, score, [name(step)])
            scores[name(step)] = max(score, scores.get(name(step), -2.0))
        assert len(retention.spared()) <= 3
    if scores:
        assert retention.best is not None
        assert retention.best.score == max(scores.values())


def test_the_best_is_written_down(tmp_path: Path):
    assert read_best(tmp_path) is None
    best = Best(name(3), 0.5, "mid")
    write_best(tmp_path, best)
    assert read_best(tmp_path) is None, "its checkpoint is gone"
    (tmp_path / best.checkpoint).mkdir()
    assert read_best(tmp_path) == best
    assert Retention("mid", best=best).spared() == {best.checkpoint}
    assert Retention("hard", best=best).spared() == frozenset()
    (tmp_path / "best.json").write_text("torn")
    assert read_best(tmp_path) is None
    older = f'{{"checkpoint": "{best.checkpoint}", "score": 0.5, "by": "mid"}}'
    (tmp_path / "best.json").write_text(older)
    assert read_best(tmp_path) == best
    write_best(tmp_path, None)
    assert not (tmp_path / "best.json").exists()
    write_best(tmp_path, None)
