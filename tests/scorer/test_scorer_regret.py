"""The regret of paired plays: pairs, intervals, noise, the three estimates."""

from __future__ import annotations

import math
import random
from statistics import fmean
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import RewardConfig
from roles.scorer.rewards import regret_credit
from roles.scorer.state import Design, Play, Plays, PlayStatus
from roles.scorer.window import Statistics, doubt, evidence, measure, shrink, spread, wilson

RETURNS = st.sampled_from([-1.0, 0.0, 0.3, 1.0])


Returns = dict[int, dict[int, float]]


def window(plain: Returns, hinted: Returns) -> Design:
    """Return a design with these returns by round and index; other plays were lost."""

    def plays(returns: dict[int, float]) -> list[Play]:
        most = max(returns, default=-1)
        return [
            Play(status=PlayStatus.DONE, returned=returns[i])
            if i in returns
            else Play(status=PlayStatus.LOST)
            for i in range(most + 1)
        ]

    rounds = {n: Plays(plays(plain.get(n, {})), plays(hinted.get(n, {}))) for n in plain | hinted}
    return Design(design="d", cohort=0, slot=0, skill="Logic", rounds=rounds)


def found_in(plain: Returns, hinted: Returns, lowest: float = 0.0) -> Statistics:
    return measure(RewardConfig(lowest_return=lowest), window(plain, hinted), 1)


def test_regret_is_paired_by_round_and_index() -> None:
    plain = {3: {0: 0.0, 1: 1.0, 3: 1.0}, 4: {0: 1.0, 1: 1.0}}
    found = found_in(plain, {3: {0: 1.0, 1: 1.0, 2: 0.0, 9: 0.0}})
    assert found.regret == pytest.approx(0.5)
    assert found.win == pytest.approx(0.8)
    assert found.hinted == pytest.approx(0.5)
    assert (found.plays, found.hinted_plays, found.pairs) == (5, 4, 2)
    assert found.doubt is not None
    assert found.doubt.low <= 0.5 <= found.doubt.high


def test_rounds_without_a_plain_outcome_are_left_out() -> None:
    found = found_in({4: {1: 0.0, 0: 1.0}, 3: {}, 2: {0: 0.5}}, {})
    assert list(found.rounds.items()) == [(2, [0.5]), (4, [1.0, 0.0])]


def test_pairs_are_pooled_over_the_rounds_with_hints() -> None:
    plain = {3: {0: 0.0, 1: 1.0}, 4: {0: 0.0, 1: 0.0}, 5: {0: 1.0}}
    found = found_in(plain, {3: {0: 1.0, 1: 1.0}, 4: {0: 1.0, 1: 0.0}})
    assert (found.pairs, found.regret) == (4, 0.5)
    alone = found_in(plain, {3: {0: 1.0, 1: 1.0}})
    assert (alone.pairs, alone.regret) == (2, 0.5)
    assert found.noise_floor is not None
    assert alone.noise_floor == pytest.approx(found.noise_floor * math.sqrt(2))
    assert found.doubt is not None
    assert alone.doubt is not None
    assert alone.doubt.low < found.doubt.low, "more pairs, less doubt"


def test_without_a_pair_there_is_no_regret() -> None:
    found = found_in({3: {0: 0.0}}, {3: {5: 1.0}})
    assert (found.pairs, found.regret, found.doubt) == (0, None, None)
    assert (found.hinted, found.win) == (1.0, 0.0)


def test_regret_needs_both_arms_in_a_round() -> None:
    assert found_in({4: {0: 0.0}}, {3: {0: 1.0}}).regret is None
    assert found_in({3: {0: 0.0}}, {}).regret is None
    empty = found_in({}, {})
    assert (empty.plays, empty.win, empty.win_low, empty.win_high) == (0, 0.0, 0.0, 1.0)


def test_noise_floor_is_the_standard_error_without_an_effect() -> None:
    found = found_in({3: {0: 0.0, 1: 1.0}}, {3: {0: 0.0, 1: 1.0}})
    assert found.noise_floor == pytest.approx(math.sqrt(2 * 0.25 / 2))
    lost = found_in({3: dict.fromkeys(range(8), 0.0)}, {3: dict.fromkeys(range(8), 1.0)})
    assert lost.noise_floor is not None
    assert 0.05 < lost.noise_floor < 0.2, "eight losses do not prove that no play is ever won"
    wide = found_in({3: {0: -1.0, 1: 1.0}}, {3: {0: -1.0, 1: 1.0}}, lowest=-1.0)
    assert wide.noise_floor == pytest.approx(math.sqrt(2 * 1.0 / 2)), "twice the range, twice the noise"


@given(st.lists(RETURNS, min_size=1, max_size=40), st.sampled_from([0.0, -1.0]))
def test_wilson_contains_the_mean(returns: list[float], lowest: float) -> None:
    low, high = wilson(returns, lowest)
    mean = sum(returns) / len(returns)
    assert low - 1e-9 <= mean <= high + 1e-9
    assert low >= min(lowest, mean) - 1e-9
    assert high <= 1.0


def test_wilson_matches_the_textbook() -> None:
    assert wilson([1.0] * 8 + [0.0] * 2) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson([1.0] * 8 + [-1.0] * 2, -1.0) == (
        pytest.approx(2 * 0.4902 - 1, abs=2e-4),
        pytest.approx(2 * 0.9433 - 1, abs=2e-4),
    )


@pytest.mark.parametrize("lowest", [0.0, -1.0])
def test_one_negative_return_makes_no_jump(lowest: float) -> None:
    """The range is declared, not read off the values: a return a hair below 0 changes nothing visible."""
    wins = [1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    at, below = wilson([*wins, 0.0], lowest), wilson([*wins, -1e-6], lowest)
    assert below == pytest.approx(at, abs=1e-5)
    one, other = (
        found_in({3: dict(enumerate([*wins, value]))}, {3: dict.fromkeys(range(8), 1.0)}, lowest)
        for value in (0.0, -1e-6)
    )
    assert one.doubt is not None
    assert other.doubt is not None
    assert (other.doubt.low, other.noise_floor) == pytest.approx((one.doubt.low, one.noise_floor), abs=1e-5)


def test_the_interval_is_the_same_everywhere() -> None:
    values = [1.0, 0.0, 0.0, 1.0, -1.0, 1.0]
    assert doubt(values, 1.0, 7) == doubt(values, 1.0, 7)
    assert doubt(values, 1.0, 7) != doubt(values, 1.0, 8)
    assert doubt([], 1.0, 7) is None


@pytest.mark.parametrize("value", [-1.0, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("pairs", [1, 4, 8, 64])
def test_equal_pairs_leave_doubt(value: float, pairs: int) -> None:
    found = doubt([value] * pairs, 1.0, 7)
    assert found is not None
    assert found.high - found.low > 0.5 / pairs
    assert found.low <= value <= found.high
    assert found.lower <= value
    assert found.variance > 0


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=20), st.integers(0, 99))
def test_the_bounds_are_in_order(differences: list[float], seed: int) -> None:
    found = doubt(differences, 1.0, seed)
    assert found is not None
    mean = sum(differences) / len(differences)
    assert -1.0 <= found.low <= found.lower <= mean + 1e-12
    assert mean - 1e-12 <= found.high <= 1.0


def test_the_lower_bound_has_one_side() -> None:
    found = doubt([1.0, 0.0, 0.0, 1.0, -1.0, 1.0], 1.0, 7, confidence=0.975)
    assert found is not None
    assert found.lower == pytest.approx(found.low)


def test_the_interval_covers_what_it_says() -> None:
    """Of 400 experiments with eight pairs, the 95 % interval misses the truth in few."""
    import random

    chance, missed = random.Random(5), 0
    for trial in range(400):
        differences = [float(chance.random() < 0.8) - float(chance.random() < 0.5) for _ in range(8)]
        found = doubt(differences, 1.0, trial)
        assert found is not None
        missed += not found.low <= 0.3 <= found.high
    assert missed / 400 < 0.08


def test_spread_of_a_coin_and_of_equal_values() -> None:
    assert spread([0.0, 1.0], 0.0, 1.0) == pytest.approx(0.25)
    assert spread([], 0.0, 1.0) == pytest.approx(0.25)
    assert 0 < spread([0.5] * 9, 0.0, 1.0) < 0.05


def test_shrinking_takes_away_what_is_noise() -> None:
    assert shrink([], []) == []
    assert shrink([0.2, -0.25, 0.1], [0.1] * 3) == [0.0, 0.0, 0.0], "means no larger than their noise"
    kept = shrink([0.8, 0.7, 0.9, 0.0], [0.02, 0.02, 0.2, 0.02])
    assert 0.75 < kept[0] < 0.8
    assert kept[2] < kept[0], "a noisier mean is trusted less"
    assert kept[3] == 0.0
    assert shrink([0.5], [0.1]) == pytest.approx([0.5 * (1 - 0.1 / 0.25)]), "James-Stein"


# --- How much of a regret is luck: simulated designs, and what each estimate pays for them (docs/credit.md)


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
        designs, found = list[Design](), list[Statistics]()
        for index in range(COHORT):
            win = 0.5 + (gain if index < helped * COHORT else 0.0)
            plain, hinted = (
                {r: {i: float(chance.random() < p) for i in range(plays)} for r in range(rounds)}
                for p in (0.5, win)
            )
            designs.append(window(plain, hinted))
            found.append(measure(settings, designs[-1], cohort * COHORT + index))
        proofs = evidence(settings, designs, found)[: round(helped * COHORT)]
        credit += [regret_credit(one.regret, 0.15) for one in proofs]
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
