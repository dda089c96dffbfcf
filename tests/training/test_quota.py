"""A quota below what rounds produce: which samples it takes, how old they get, and what the role weighs."""

from __future__ import annotations

from typing import Any

import pytest
from learner_fakes import VOCABULARY, round_of, sample

from engine.config import RoleTraining
from engine.lineage import Lineage, Version
from engine.training.batch import batch_size, policy_rows, share
from engine.training.buffer import Buffer, Selection
from engine.training.samples import CreditedSample

_ROUNDS, _SENT, _QUOTA = 12, 8, 4


def close(buffer: Buffer, number: int, samples: list[CreditedSample], **closed: Any) -> Selection:
    """Let a round of samples arrive and close it at the version of its number."""
    *messages, closing = round_of(number, samples, **closed)
    for index, message in enumerate(messages):
        buffer.admit(100 * number + index, message)  # type: ignore[arg-type]
    return buffer.close(closing, Version(0, number), Lineage())  # type: ignore[arg-type]


def _play(limit: RoleTraining) -> tuple[list[float], dict[str, int]]:
    """Return the mean age of each batch, and how many samples ended by which cause."""
    limits: dict[Any, RoleTraining] = {"agent": limit, "designer": RoleTraining()}
    buffer = Buffer(limits, vocabulary=VOCABULARY)
    ages: list[float] = []
    causes: dict[str, int] = {}
    for number in range(_ROUNDS):
        samples = []
        for index in range(_SENT):
            name = f"{number}-{index}"
            samples.append(sample(name, round_=number, versions=[Version(0, number)]))
        final = number == _ROUNDS - 1
        selection = close(buffer, number, samples, final=final)
        assert len(selection.samples) == _QUOTA
        ages.append(sum(selection.ages) / _QUOTA)
        for _, cause in selection.dropped:
            causes[cause] = causes.get(cause, 0) + 1
    assert sum(causes.values()) + _ROUNDS * _QUOTA == _ROUNDS * _SENT
    return ages, causes


def test_the_oldest_first_stand_at_the_bound_in_time():
    ages, causes = _play(RoleTraining(quota=_QUOTA, max_staleness=3))
    assert ages[:7] == [0, 1, 1, 2, 2, 3, 3]
    assert set(ages[7:]) == {3}
    assert set(causes) == {"stale", "quota"}


def test_the_newest_first_stay_fresh():
    ages, causes = _play(RoleTraining(quota=_QUOTA, max_staleness=3, priority="newest"))
    assert set(ages) == {0}
    assert set(causes) == {"stale", "quota"}


def test_a_full_buffer_of_the_newest_lets_the_oldest_go():
    limits: dict[Any, RoleTraining] = {
        "agent": RoleTraining(priority="newest", quota=1, max_staleness=9),
        "designer": RoleTraining(),
    }
    buffer = Buffer(limits, vocabulary=VOCABULARY, capacity=2)
    close(buffer, 0, [sample(f"of-0-{index}") for index in range(2)])
    selection = close(buffer, 1, [sample(f"of-1-{index}", round_=1) for index in range(2)])
    assert [one.round for one in selection.samples] == [1]
    assert [cause for _, cause in selection.dropped] == ["quota"]
    assert [one.round for one in buffer.state().kept] == [1]


def _weight(samples: list[CreditedSample], size: float) -> float:
    training: dict[Any, RoleTraining] = {"agent": RoleTraining(), "designer": RoleTraining()}
    return sum(row.weight * int(row.mask.sum()) for row in policy_rows(samples, training, size))


@pytest.mark.parametrize("without_variance", [0, 16])
def test_a_quota_takes_no_weight_from_the_role(without_variance: int):
    sent = [sample(f"s{index}") for index in range(32)]
    plays, designs = len(sent) + without_variance, 0
    whole = _weight(sent, batch_size(plays * share(0, len(sent)), designs, plays))
    part = _weight(sent[:8], batch_size(plays * share(8, len(sent)), designs, plays))
    assert part == pytest.approx(whole)
    assert share(64, len(sent)) == share(8, 0) == 1.0
