"""What pays for no play is found, honest games are left in peace, and a judge cannot be told by its seeds."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from sandbox_hacks import HIDDEN, PAID, SEEDS_OF_A_JUDGE, program
from sandbox_honest import HONEST
from scenes.sandboxes import held_pool

from sandbox import SandboxPool, SandboxSettings, Validator, ValidatorSettings, Verdict

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[SandboxPool]:
    async with held_pool(SandboxSettings(zygotes=2, strikes=0, nice=0)) as pool:
        yield pool


async def judged(pool: SandboxPool, source: str, **settings: object) -> Verdict:
    return await Validator(pool, ValidatorSettings(**settings)).validate(source)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PAID)
async def test_pay_for_no_play_is_found(pair: SandboxPool, name: str) -> None:
    found = await judged(pair, PAID[name])
    assert (found.ok, found.degenerate) == (True, True), found
    assert found.trivial_win_rate >= 0.9
    assert "without looking" in found.hack


@pytest.mark.parametrize("name", HIDDEN)
async def test_what_pays_where_nobody_judges_is_found(pair: SandboxPool, name: str) -> None:
    rung, source = HIDDEN[name]
    found = await judged(pair, source)
    assert found.rung == rung, found


@pytest.mark.parametrize("name", HONEST)
async def test_honest_games_are_left_in_peace(pair: SandboxPool, name: str) -> None:
    found = await judged(pair, HONEST[name])
    assert (found.rung, found.reason, found.degenerate) == ("accepted", "", False), found.hack


async def test_a_judge_is_not_told_by_its_seeds(pair: SandboxPool) -> None:
    found = await judged(pair, program(SEEDS_OF_A_JUDGE))
    assert found.degenerate
    seeds = {episode.seed for episode in found.episodes}
    assert max(seeds) > 200_000
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    again = await judged(pair, program(SEEDS_OF_A_JUDGE))
    assert again == found
    for other in (
        await judged(pair, program(SEEDS_OF_A_JUDGE) + "# another\n"),
        await judged(pair, program(SEEDS_OF_A_JUDGE), salt="another"),
    ):
        assert seeds.isdisjoint(episode.seed for episode in other.episodes)


async def test_a_replay_says_what_to_do(pair: SandboxPool) -> None:
    found = await judged(pair, HIDDEN["the first reset of a process"][1])
    assert re.search(r"reward 1.* instead of reward 0.*reset must set everything", found.reason)
