"""Judge and play alike: bad programs are found, good ones pass, and a play pays what the judgement saw."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence

import pytest
import pytest_asyncio
from judged_corpus import BAD, GOOD, TELLS
from scenes.sandboxes import held_pool

from sandbox import SandboxPool, SandboxSettings, Validator, ValidatorSettings, Verdict
from sandbox.probes import Transcript, play

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
SETTINGS = ValidatorSettings(solution="require", salt="of a run")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[SandboxPool]:
    async with held_pool(SandboxSettings(zygotes=2, strikes=0, nice=0)) as pool:
        yield pool


async def judge(pool: SandboxPool, programs: Mapping[str, str]) -> dict[str, Verdict]:
    validator = Validator(pool, SETTINGS)
    found = await asyncio.gather(*(validator.validate(source, max_turns=10) for source in programs.values()))
    return dict(zip(programs, found, strict=True))


def told(found: Mapping[str, Verdict]) -> dict[str, str]:
    return {name: f"{verdict.rung}: {verdict.reason or verdict.hack}" for name, verdict in found.items()}


async def test_bad_programs_are_rejected_or_flagged(pair: SandboxPool) -> None:
    found = await judge(pair, BAD)
    missed = told({name: verdict for name, verdict in found.items() if verdict.ok and not verdict.degenerate})
    assert len(BAD) >= 60
    assert len(missed) <= 0.05 * len(BAD), missed


async def test_good_programs_are_accepted_and_none_is_flagged(pair: SandboxPool) -> None:
    found = await judge(pair, GOOD)
    refused = told({name: verdict for name, verdict in found.items() if not verdict.ok})
    flagged = told({name: verdict for name, verdict in found.items() if verdict.degenerate})
    assert len(GOOD) >= 60
    assert flagged == {}
    assert len(refused) <= 0.05 * len(GOOD), refused
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
        if verdict.ok:
            for episode in random.Random(name).sample(verdict.episodes, 3):
                judged = episode.transcript
                played = await play_afresh(pool, programs[name], episode.seed, judged.actions)
                assert (played.first, played.returned) == (judged.first, judged.returned), name


@pytest.mark.parametrize("name", TELLS)
async def test_a_program_that_tells_a_judge_from_a_play_gains_nothing(pair: SandboxPool, name: str) -> None:
    """It is rejected or flagged, or nonsense pays it as little in plays as it did before the judge."""
    (found,) = (await judge(pair, {name: TELLS[name]})).values()
    if not found.ok or found.degenerate:
        return
    for seed in range(20):
        played = await play_afresh(pair, TELLS[name], seed, ["no idea", "not a clue"])
        assert played.returned == 0.0
