"""Rolling updates: one server loads at a time, nobody waits for ever, nobody is overtaken."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes.fake_vllm import FakeVllm, fake_vllm, policy, until
from server_stage import Stage, on_stage

import roles.server.rolling_update as module
from bus.messages import Message, ServerLost, ServerServing
from engine.config import ServerConfig
from roles.server.rolling_update import RollingUpdate, UpdateOrder


def serving(server: str, version: int, *, epoch: str = "1", seconds: float = 0.0) -> ServerServing:
    return ServerServing(
        server=server, epoch=epoch, url="http://x", version=version, canary_error=0.0, seconds=seconds
    )


def lost(server: str, epoch: str = "1") -> ServerLost:
    return ServerLost(server=server, epoch=epoch, reason="test")


def order(*facts: Message) -> UpdateOrder:
    made = UpdateOrder()
    for fact in facts:
        made.note(fact)
    return made


def test_the_oldest_version_goes_first_and_of_equals_the_lesser_name() -> None:
    made = order(serving("a", 2), serving("b", 1), serving("c", 1))
    assert [made.before(name, 3) for name in "abc"] == ["b", None, "b"]
    made.note(serving("b", 3))
    assert [made.before(name, 3) for name in "abc"] == ["c", "c", None]
    made.note(serving("c", 3))
    assert made.before("a", 3) is None
    assert made.before("b", 4) == "a", "who has just loaded does not overtake who waits"


def test_who_does_not_serve_waits_for_nobody_and_is_waited_for_by_nobody() -> None:
    made = order(serving("b", 1))
    assert made.before("a", 2) is None
    assert made.before("b", 2) is None
    made.note(serving("a", 1))
    assert made.before("b", 2) == "a"
    made.note(lost("a", epoch="older"))
    assert made.before("b", 2) == "a"
    made.note(lost("a"))
    assert made.before("b", 2) is None


def test_an_older_fact_of_the_same_life_changes_nothing() -> None:
    made = order(serving("a", 3), serving("b", 2), serving("a", 1))
    assert made.before("a", 4) == "b"
    made.note(serving("a", 1, epoch="2"))
    assert made.before("a", 4) is None


def test_patience_follows_the_slowest_update() -> None:
    assert order(serving("a", 1, seconds=1.0)).patience == module.LEAST_PATIENCE
    assert order(serving("a", 1, seconds=30.0), serving("a", 2, seconds=2.0)).patience == 120.0


def test_the_turn_of_others_has_come_after_the_patience_with_each_that_has_not_loaded() -> None:
    made = order(serving("a", 1), serving("b", 1), serving("c", 2), serving("d", 1, seconds=5.0))
    assert [made.detour(name, 2) for name in "abcd"] == [40.0, 40.0, 60.0, 40.0]
    made.overstayed("b")
    assert made.detour("a", 2) == 20.0
    made.note(serving("d", 2))
    assert made.detour("a", 2) == 0.0
    made.note(serving("b", 1, epoch="2"))
    assert made.detour("a", 2) == 20.0


async def test_who_loads_without_a_turn_needs_no_detour() -> None:
    for rolling, seconds in ((True, module.LEAST_PATIENCE), (False, 0.0)):
        rollout = RollingUpdate(rolling=rolling)
        for fact in (serving("a", 1), serving("b", 1)):
            rollout.note(fact)
        assert rollout.detour("a", 2) == seconds


async def test_nobody_waits_for_a_server_that_refused() -> None:
    rollout = RollingUpdate(rolling=True)
    for fact in (serving("a", 1), serving("b", 1)):
        rollout.note(fact)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rollout.turn, "b", 2)
            await anyio.wait_all_tasks_blocked()
            rollout.refused("a")
        rollout.refused("who does not serve")
    assert rollout.passed == 0


async def test_whether_others_carry_a_version_is_known_as_soon_as_it_is_decided() -> None:
    rollout = RollingUpdate(rolling=True)
    with anyio.fail_after(5):
        assert not await rollout.others_carry(2, beside="a", seconds=60), "there is nobody else"
        for fact in (serving("a", 2), serving("b", 1)):
            rollout.note(fact)
        assert not await rollout.others_carry(2, beside="a", seconds=0.01), "not in time"
        found: list[bool] = []

        async def ask() -> None:
            found.append(await rollout.others_carry(2, beside="a", seconds=60))

        for fact in (serving("b", 3), lost("b", epoch="2")):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                rollout.note(fact)
            rollout.note(serving("b", 1, epoch="2"))
    assert found == [True, False]


@given(st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_at_most_one_loads_whatever_each_has_heard_so_far(count: int, seed: int) -> None:
    """Each role has heard a prefix of the stream of its own length, and its own words at once."""
    chance = random.Random(seed)
    names = [f"s{index}" for index in range(count)]
    stream: list[ServerServing] = [serving(name, 1) for name in names]
    views = {name: order(*stream) for name in names}
    heard = dict.fromkeys(names, len(stream))
    newest, loading = 2, ""
    served = dict.fromkeys(names, 1)
    for _ in range(200):
        name = chance.choice(names)
        match chance.choice(("hear", "start", "finish", "publish")):
            case "hear" if heard[name] < len(stream):
                views[name].note(stream[heard[name]])
                heard[name] += 1
            case "start" if name != loading and served[name] < newest:
                if views[name].before(name, newest) is None:
                    assert not loading, f"{name} and {loading} load at once"
                    loading, target = name, newest
            case "finish" if loading:
                fact = serving(loading, target)
                served[loading] = target
                stream.append(fact)
                views[loading].note(fact)
                loading = ""
            case "publish" if newest < 6:
                newest += 1
    for _ in range(count + 1):  # left alone, everybody gets there, one after the other
        if loading:
            stream.append(serving(loading, target))
            served[loading], loading = target, ""
        views = {name: order(*stream) for name in names}
        free = [name for name in names if served[name] < newest and views[name].before(name, newest) is None]
        assert len(free) == (min(served.values()) < newest)
        for name in free:
            loading, target = name, newest
    assert set(served.values()) == {newest}


async def test_together_waits_for_nobody() -> None:
    rollout = RollingUpdate(rolling=False)
    rollout.note(serving("a", 1))
    rollout.note(serving("b", 1))
    with anyio.fail_after(1):
        await rollout.turn("b", 2)


async def test_a_dead_server_blocks_nobody_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_PATIENCE", 0.05)
    rollout = RollingUpdate(rolling=True)
    for fact in (serving("a", 1), serving("b", 1)):
        rollout.note(fact)
    with anyio.fail_after(5):
        await rollout.turn("b", 2)
        rollout.note(serving("b", 2))
        await rollout.turn("b", 3)
    assert rollout.passed == 1
    assert 0.05 <= rollout.waited < 1.0
    rollout.note(serving("a", 1, epoch="2"))
    with anyio.move_on_after(0.02) as waiting:
        await rollout.turn("b", 3)
    assert waiting.cancelled_caught, "one that is back is waited for again"


async def test_a_turn_begins_when_the_one_before_is_done_or_lost() -> None:
    rollout = RollingUpdate(rolling=True)
    for fact in (serving("a", 1), serving("b", 1), serving("c", 1)):
        rollout.note(fact)
    done: list[str] = []

    async def wait(name: str) -> None:
        await rollout.turn(name, 2)
        done.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "b")
        tasks.start_soon(wait, "c")
        await anyio.wait_all_tasks_blocked()
        assert done == []
        rollout.note(serving("a", 2))
        await anyio.wait_all_tasks_blocked()
        assert done == ["b"]
        rollout.note(lost("b"))
        await anyio.wait_all_tasks_blocked()
        assert done == ["b", "c"]


def standing_still(journal: list[tuple[str, str]]) -> Iterator[set[str]]:
    """Yield who was paused after each step."""
    still: set[str] = set()
    for url, route in journal:
        if route == "pause":
            still.add(url)
        elif route == "resumed":
            still.discard(url)
        yield set(still)


async def rolled(tmp_path: Path, count: int, rollout: str, load: float) -> tuple[float, int, list[FakeVllm]]:
    """Return the seconds from a publication to the last announcement, and how many stood still at most."""
    journal: list[tuple[str, str]] = []
    async with anyio.create_task_group(), fake_fleet(count, journal, load) as fakes:
        stage = Stage(tmp_path, tuple(fake.url for fake in fakes), rollout=rollout)
        async with on_stage(stage):
            await stage.bus.publish(policy(1))
            await stage.until(lambda facts: len(facts) == count)
            journal.clear()
            started = perf_counter()
            await stage.bus.publish(policy(2))
            await stage.until(lambda facts: len(facts) == 2 * count)
            seconds = perf_counter() - started
        return seconds, max(map(len, standing_still(journal))), fakes


def fake_fleet(count: int, journal: list[tuple[str, str]], load: float):
    from contextlib import AsyncExitStack, asynccontextmanager

    @asynccontextmanager
    async def open_fleet():
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(fake_vllm(journal=journal, load_seconds=load))
                for _ in range(count)
            ]

    return open_fleet()


async def test_capacity_never_drops_to_zero(tmp_path: Path) -> None:
    rolling, still, _ = await rolled(tmp_path / "rolling", 3, "rolling", 0.1)
    assert still == 1
    assert rolling >= 3 * 0.1, "the price: one load after the other until all serve the version"
    _, still, _ = await rolled(tmp_path / "together", 3, "together", 0.1)
    assert still == 3


async def test_a_server_that_is_known_but_dead_delays_an_update_by_the_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_PATIENCE", 0.1)
    async with fake_vllm() as fake, fake_vllm() as foreign:
        stage = Stage(tmp_path, (fake.url,))
        await stage.bus.publish(
            ServerServing(
                server="a-dead-0", epoch="1", url=foreign.url, version=1, canary_error=0.0, seconds=0.0
            )
        )
        async with on_stage(stage):
            await stage.bus.publish(policy(1))
            await stage.until(lambda facts: len(facts) == 2)
            await stage.bus.publish(policy(2))
            await stage.served(2)
            assert stage.role.statistics()["turns_passed"] == 1
            assert stage.role.statistics()["server-0-0.update_seconds"] < 10
            assert stage.role.statistics()["server-0-0.step"] == 2


async def test_a_server_samples_while_it_waits_for_its_turn(tmp_path: Path) -> None:
    async with fake_vllm() as first, fake_vllm() as second:
        stage = Stage(tmp_path, (first.url, second.url))
        async with on_stage(stage):
            await stage.bus.publish(policy(1))
            await stage.until(lambda facts: len(facts) == 2)
            first.load_seconds = 0.2
            await stage.bus.publish(policy(2))
            await until(lambda: first.paused)
            assert not second.paused
            await stage.until(lambda facts: len(facts) == 4)
            assert [fact.server for fact in stage.facts[2:]] == ["server-0-0", "server-0-1"]


def test_the_setting_is_rolling_by_default() -> None:
    assert ServerConfig().rollout == "rolling"
