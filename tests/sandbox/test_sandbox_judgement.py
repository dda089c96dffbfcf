"""Judge and play alike: bad programs are found, good ones pass, and a play pays what the judgement saw."""

from __future__ import annotations

import asyncio
import random
import re
import textwrap
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from judged_corpus import BAD, GOOD
from sandbox_hacks import HIDDEN, PAID, SEEDS_OF_A_JUDGE, program
from sandbox_honest import HONEST
from scenes.sandboxes import held_pool

from sandbox import SandboxPool, SandboxSettings, Validator, ValidatorSettings, Verdict
from sandbox.probes import Transcript, play

# each of two tests judges dozens of programs
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
# rejected; all other bad programs are flagged
REJECTED = ("leak: ", "useless: ")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[SandboxPool]:
    async with held_pool(SandboxSettings(zygotes=2, strikes=0, nice=0)) as pool:
        yield pool


async def judged(pool: SandboxPool, source: str, turns: int = 25, **settings: object) -> Verdict:
    return await Validator(pool, ValidatorSettings(**settings)).validate(source, max_turns=turns)  # type: ignore[arg-type]


async def judge(pool: SandboxPool, programs: Mapping[str, str]) -> dict[str, Verdict]:
    """Judge as a run of the full prompt does."""
    rules = {"solution": "require", "salt": "of a run"}
    found = await asyncio.gather(*(judged(pool, source, 10, **rules) for source in programs.values()))
    return dict(zip(programs, found, strict=True))


def told(found: Mapping[str, Verdict]) -> dict[str, str]:
    return {name: f"{verdict.rung}: {verdict.reason or verdict.hack}" for name, verdict in found.items()}


async def test_bad_programs_are_rejected_or_flagged(pair: SandboxPool) -> None:
    found = await judge(pair, BAD)
    assert len(BAD) >= 60
    missed = {
        name: verdict
        for name, verdict in found.items()
        if verdict.ok and (name.startswith(REJECTED) or not verdict.degenerate)
    }
    assert told(missed) == {}
    for verdict in found.values():
        low, high = verdict.trivial_interval
        assert low <= verdict.trivial_win_rate <= high
        assert bool(verdict.hack) == verdict.degenerate or not verdict.ok


async def test_good_programs_are_accepted_and_none_is_flagged(pair: SandboxPool) -> None:
    found = await judge(pair, GOOD)
    assert len(GOOD) >= 40
    assert told({name: one for name, one in found.items() if not one.ok or one.degenerate}) == {}
    await plays_pay_what_was_judged(pair, GOOD, found)


async def play_afresh(pool: SandboxPool, source: str, seed: int, actions: Sequence[str]) -> Transcript:
    """Play in a process of its own, as a run does."""
    async with await pool.spawn(source, seed=seed, kwargs={"max_turns": 10}) as instance:
        return await play(instance, instance.first, iter(actions))


async def plays_pay_what_was_judged(
    pool: SandboxPool, programs: Mapping[str, str], found: Mapping[str, Verdict]
) -> None:
    """Play judged episodes again."""
    for name, verdict in found.items():
        for episode in random.Random(name).sample(verdict.episodes, 3):
            judged = episode.transcript
            played = await play_afresh(pool, programs[name], episode.seed, judged.actions)
            assert (played.first, played.returned) == (judged.first, judged.returned), name


@pytest.mark.parametrize("name", PAID)
async def test_pay_for_no_play_is_found(pair: SandboxPool, name: str) -> None:
    found = await judged(pair, PAID[name])
    assert (found.ok, found.degenerate) == (True, True), found
    assert found.trivial_win_rate >= 0.9
    assert "without looking" in found.hack


@pytest.mark.parametrize("name", HIDDEN)
async def test_pay_where_nobody_judges_is_found(pair: SandboxPool, name: str) -> None:
    rung, source = HIDDEN[name]
    found = await judged(pair, source)
    assert found.rung == rung, found
    if name == "the first reset of a process":
        assert re.search(r"reward 1.* instead of reward 0.*reset must set everything", found.reason)


@pytest.mark.parametrize("name", HONEST)
async def test_honest_games_are_left_in_peace(pair: SandboxPool, name: str) -> None:
    found = await judged(pair, HONEST[name])
    assert (found.rung, found.reason, found.degenerate) == ("accepted", "", False), found.hack


async def test_the_examples_of_the_documentation_are_good(pair: SandboxPool) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    indented = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", page, re.MULTILINE)
    programs = [textwrap.dedent(block) for block in indented if "class " in block]
    assert len(programs) == 2
    for source in programs:
        found = await judged(pair, source)
        assert (found.rung, found.degenerate) == ("accepted", False), found


async def test_a_judge_is_not_told_by_its_seeds(pair: SandboxPool) -> None:
    found = await judged(pair, program(SEEDS_OF_A_JUDGE))
    assert found.degenerate
    seeds = {episode.seed for episode in found.episodes}
    assert max(seeds) > 200_000
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    assert await judged(pair, program(SEEDS_OF_A_JUDGE)) == found
    for other in (
        await judged(pair, program(SEEDS_OF_A_JUDGE) + "# another\n"),
        await judged(pair, program(SEEDS_OF_A_JUDGE), salt="another"),
    ):
        assert seeds.isdisjoint(episode.seed for episode in other.episodes)
