"""The whole attack suite, on this host and on poorer ones."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from attacks import every
from attacks.inside import LITTER
from sandbox_siege import POORER_HOSTS, Siege, besiege, owned
from scenes.sandboxes import held_pool

from sandbox import SandboxPool, SandboxSettings

# the siege is the set-up of whichever test comes first
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ATTACKS = every()
SETTINGS = SandboxSettings(
    zygotes=2, cpu_call_seconds=0.25, cpu_load_seconds=0.4, wall_call_seconds=2.0, strikes=0, nice=0
)
# an attack may take the engine's thread no longer than this at a time, in seconds of its CPU
LAG = 0.1

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="taking features away needs root")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def siege() -> AsyncIterator[Siege]:
    async with held_pool(SETTINGS) as pool:
        yield await besiege(pool, ATTACKS)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ATTACKS)
async def test_attack(siege: Siege, name: str) -> None:
    assert siege.outcomes[name] in ATTACKS[name].expect.split("|")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_siege_leaves_nothing(siege: Siege) -> None:
    assert siege.after == siege.before


@pytest.mark.asyncio(loop_scope="module")
async def test_the_engine_and_the_neighbours_go_on(siege: Siege) -> None:
    assert siege.lag < LAG
    assert siege.steps > 20


@needs_root
def test_what_is_left_over_would_be_seen() -> None:
    """The look for leftovers is not blind: a file of an instance's uid in a shared place shows."""
    mine = Path("/dev/shm") / f"left-{os.getpid()}"
    mine.touch()
    try:
        os.chown(mine, 1_500_000_123, -1)
        assert mine in owned(Path("/dev/shm"), {1_500_000_000})
        assert mine not in owned(Path("/dev/shm"), {1_400_000_000})
    finally:
        mine.unlink()


def test_the_suite_is_large_and_covers_the_cases() -> None:
    assert len(ATTACKS) >= 100
    assert len({attack.source for attack in ATTACKS.values()}) == len(ATTACKS)
    cases = {attack.case for attack in ATTACKS.values()}
    assert cases >= {*range(1, 25)}


def test_the_page_names_real_tests() -> None:
    here = Path(__file__).parent
    page = (here.parents[1] / "docs" / "sandbox.md").read_text().partition("## The cases")[2]
    rows = [line.split("|") for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[1]) for row in rows] == list(range(1, 31))
    for row in rows:
        for part in row[3].split(";"):
            words = re.findall(r"[\w/]+\.py|`\w+`", part)
            text = "".join((here / word).read_text() for word in words if word.endswith(".py"))
            assert text or "spade bench" in part, part
            assert all(word.strip("`") in text for word in words if word.startswith("`")), part


@pytest.mark.parametrize(("features", "missing"), POORER_HOSTS)
async def test_attacks_on_poorer_hosts(features: tuple[str, ...], missing: tuple[str, ...]) -> None:
    async with SandboxPool(SETTINGS) as _, held_pool(SETTINGS, *features) as pool:
        assert [word for word in missing if word not in " ".join(pool.report.missing)] == []
        found = await besiege(pool, ATTACKS)
    assert found.wrong(ATTACKS) == {}
    assert found.after == found.before
    assert found.lag < LAG
    assert found.steps > 20


async def test_nothing_persists_from_one_instance_to_the_next() -> None:
    async with SandboxPool(SandboxSettings(zygotes=1)) as pool:
        seen = []
        for _ in range(3):
            async with await pool.spawn(LITTER) as instance:
                seen.append((await instance.step("look")).observation)
                # and it is there within the same instance: the look can see something
                assert (await instance.step("again")).observation != seen[-1]
        # one that lives on changes nothing for those born beside it
        async with await pool.spawn(LITTER) as older:
            await older.step("look")
            async with await pool.spawn(LITTER) as instance:
                seen.append((await instance.step("look")).observation)
    assert len(set(seen)) == 1


async def test_crowded_attacks_leave_figures_as_they_were() -> None:
    """Many of the fastest kills at once: places and descriptors come back."""
    attacks = {name: ATTACKS[name] for name in ATTACKS if name.startswith("hostile ")}
    async with SandboxPool(SETTINGS) as pool:
        crowd = {f"{name} {k}": attack for name, attack in attacks.items() for k in range(3)}
        found = await besiege(pool, crowd, at_once=64)
        assert set(found.outcomes.values()) == {"killed"}
        assert found.after == found.before
        assert pool.statistics()["live"] == 0
