"""How much of a regret is luck: simulated designs, and what each estimate pays for them (docs/credit.md).

``PYTHONPATH=.:tests/scorer python tests/scorer/test_scorer_noise.py`` prints the table of the documentation.
"""

from __future__ import annotations

import random
from statistics import fmean
from typing import NamedTuple

import pytest

from engine.config import RewardConfig
from roles.scorer.rewards import regret_credit
from roles.scorer.window import Statistics, WindowReturns, measure, paid

ESTIMATES = ("mean", "shrunk", "lower")
COHORT = 24


class Paid(NamedTuple):
    """Of simulated designs: the share with full credit, and the mean credit."""

    full: float
    credit: float


def simulate(
    plays: int, gain: float, estimate: str, *, designs: int, helped: float = 1.0, rounds: int = 1
) -> Paid:
    """Play games that are won half the time, and with the hint ``gain`` more often.

    Each arm is played ``plays`` times in each of ``rounds`` rounds. Only a share ``helped`` of a cohort of 24
    has such a hint; the hints of the others do nothing. The result is that of the designs with such a hint.
    """
    chance = random.Random(f"{plays}:{gain}:{helped}:{rounds}")
    settings = RewardConfig(regret_estimate=estimate)  # type: ignore[arg-type]
    credit: list[float] = []
    for cohort in range(max(1, round(designs / COHORT / helped))):
        found: list[Statistics] = []
        for index in range(COHORT):
            win = 0.5 + (gain if index < helped * COHORT else 0.0)
            plain, hinted = (
                {r: {i: float(chance.random() < p) for i in range(plays)} for r in range(rounds)}
                for p in (0.5, win)
            )
            found.append(measure(WindowReturns(plain=plain, hinted=hinted), cohort * COHORT + index))
        credit += [regret_credit(one, 0.15) for one in paid(settings, found)[: round(helped * COHORT)]]
    return Paid(fmean(one == 1.0 for one in credit), fmean(credit))


@pytest.mark.parametrize(
    ("plays", "estimate", "least", "most"),
    [
        (4, "mean", 0.3, 0.43),
        (8, "mean", 0.17, 0.28),
        (4, "shrunk", 0.0, 0.06),
        (8, "shrunk", 0.0, 0.06),
        (4, "lower", 0.01, 0.07),
        (8, "lower", 0.01, 0.06),
    ],
)
def test_credit_by_chance(plays: int, estimate: str, least: float, most: float) -> None:
    """A hint that does nothing: the mean pays in full one time in three at four plays an arm."""
    assert least <= simulate(plays, 0.0, estimate, designs=480).full <= most


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_a_hint_that_works_is_paid(estimate: str) -> None:
    assert simulate(8, 0.45, estimate, designs=240).credit > 0.6
    assert simulate(8, 0.45, estimate, designs=240, helped=0.5).credit > 0.55


def test_pooled_rounds_tell_a_hint_that_works_from_luck() -> None:
    """Four plays an arm in each of four rounds: less luck and more skill than four plays once."""
    once, pooled = (simulate(4, 0.4, "lower", designs=240, rounds=n).credit for n in (1, 4))
    luck_once, luck = (simulate(4, 0.0, "mean", designs=480, rounds=n).full for n in (1, 4))
    assert pooled > once + 0.1
    assert luck < luck_once - 0.1


def table(designs: int = 12000) -> str:
    """Return the rows of the documentation's table."""
    rows = []
    for plays, rounds in ((4, 1), (8, 1), (4, 4)):
        for estimate in ESTIMATES:
            luck = simulate(plays, 0.0, estimate, designs=designs, rounds=rounds)
            cells = [
                simulate(plays, gain, estimate, designs=designs, helped=helped, rounds=rounds).credit
                for gain, helped in ((0.2, 0.5), (0.4, 0.5), (0.4, 1.0))
            ]
            arm = f"{plays}" + (f" x {rounds} rounds" if rounds > 1 else "")
            rows.append(
                f"| {arm} | `{estimate}` | {luck.full:.0%} | {luck.credit:.2f} | "
                + " | ".join(f"{cell:.2f}" for cell in cells)
                + " |"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
