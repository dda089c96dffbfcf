"""A whole run over a bus: a real scorer among scripted roles, with crashes in the middle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from scenes.memory_bus import MemoryBus
from scenes.scorer_cast import Cast, scorer, text_of
from scenes.scorer_world import config, finished, lost, published

from bus import Bus, connect, provision, serve
from bus.messages import (
    DesignRejected,
    EnvironmentReady,
    EpisodeFailed,
    EpisodeRequest,
    RoundSummary,
)
from engine.config import Config
from engine.errors import SpadeError
from roles.scorer.snapshot import SNAPSHOT_KEY, ScorerSnapshot, Snapshots
from roles.scorer.state import CurriculumState

Peer = Callable[[str, str], Awaitable[Bus]]
RECIPE = config(steps=5, curriculum={"lead": 1}, learner={"train_hinted": True})


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(run="test", role="test", instance="0")


async def until(holds: Callable[[], bool], bus: Bus) -> None:
    """Wait until ``holds``; it is looked at after every fact."""
    async with bus.follow("EVENT") as records:
        async for _ in records:
            if holds():
                return


async def complete(recipe: Config, bus: Bus, directory: Path, crashes: list[int], peer: Peer) -> Cast:
    """Run to the end; the scorer is killed each time the given number of facts is reached."""
    cast = Cast(recipe, await peer("cast", "0"))
    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cast.run)
            for number, crash in enumerate(crashes):
                with anyio.CancelScope() as life:
                    async with anyio.create_task_group() as watched:
                        watched.start_soon(_kill_at, bus, crash, life)
                        watched.start_soon(scorer(recipe, await peer("scorer", str(number)), directory).run)
            draining = anyio.Event()
            async with anyio.create_task_group() as last:
                last.start_soon(scorer(recipe, await peer("scorer", "last"), directory, draining).run)
                await cast.over.wait()
                draining.set()
    return cast


async def _kill_at(bus: Bus, sequence: int, life: anyio.CancelScope) -> None:
    async with bus.follow("EVENT") as records:
        async for record in records:
            if record.sequence >= sequence:
                life.cancel()
                return


async def check(cast: Cast, bus: Bus) -> None:
    """What must hold of a whole run, however often the scorer died."""
    steps = cast.config.run.steps
    assert [closed.round for closed in cast.closed] == list(range(steps + 1))
    assert [closed.final for closed in cast.closed] == [False] * steps + [True]
    for closed in cast.closed:
        mine = [cast.samples[name] for name in cast.rounds[closed.round]]
        assert sum(sample.role == "agent" for sample in mine) == closed.agent_samples
        assert sum(sample.role == "designer" for sample in mine) == closed.designer_samples
    assert sum(map(len, cast.rounds.values())) == len(cast.samples)
    for sample in cast.samples.values():
        text = text_of(sample)
        if sample.role == "agent":
            assert text.split("/")[1] == str(sample.round), "a sample has the tokens of its own play"
    designer = [text_of(s) for s in cast.samples.values() if s.role == "designer"]
    held = [
        f"{r.message.design}-{r.message.attempt}"
        async for r in bus.replay("EVENT", tails=["event.designer.>"])
        if isinstance(r.message, EnvironmentReady | DesignRejected)
    ]
    assert sorted(designer) == sorted(held), "every design is trained once"
    summaries = [r.message async for r in bus.replay("EVENT", tails=["event.scorer.round"])]
    assert {s.round for s in summaries if isinstance(s, RoundSummary)} == set(range(steps))


async def memory_peer(bus: MemoryBus) -> Peer:
    async def peer(role: str, instance: str) -> Bus:
        return bus.peer(role, instance)

    return peer


async def test_a_run_from_the_first_ticket_to_the_last_batch(bus: MemoryBus, tmp_path: Path) -> None:
    cast = await complete(RECIPE, bus, tmp_path, [], await memory_peer(bus))
    await check(cast, bus)
    assert max(cast.work.values()) == 1
    assert (await bus.stream_info("TASK")).messages == 0


@pytest.mark.parametrize("crashes", [[3], [20], [60], [70, 105], [15, 16, 17, 75, 76, 110]])
async def test_a_scorer_that_dies_repeats_itself(bus: MemoryBus, tmp_path: Path, crashes: list[int]) -> None:
    cast = await complete(RECIPE, bus, tmp_path, crashes, await memory_peer(bus))
    await check(cast, bus)
    undisturbed = MemoryBus(run="test", role="test", instance="0")
    (tmp_path / "none").mkdir()
    other = await complete(RECIPE, undisturbed, tmp_path / "none", [], await memory_peer(undisturbed))
    one, undisturbed_one = (
        {text_of(s): (s.credit.advantage, s.round) for s in each.samples.values()} for each in (cast, other)
    )
    assert one == undisturbed_one


async def test_a_lost_snapshot_costs_nothing_but_time(bus: MemoryBus, tmp_path: Path) -> None:
    peer = await memory_peer(bus)

    async def forgetful(role: str, instance: str) -> Bus:
        await bus.state_put(SNAPSHOT_KEY, b"garbage")
        (tmp_path / "scorer.snapshot").unlink(missing_ok=True)
        return await peer(role, instance)

    cast = await complete(RECIPE, bus, tmp_path, [50, 90], forgetful)
    await check(cast, bus)
    assert max(cast.work.values()) == 1


async def test_a_snapshot_of_facts_that_the_broker_forgot_is_not_used(bus: MemoryBus, tmp_path: Path) -> None:
    """Another fact lies at its position since: what the snapshot tells of did not happen."""
    peer = await memory_peer(bus)
    refused = []

    async def after_power_came_back(role: str, instance: str) -> Bus:
        snapshots = Snapshots(bus, tmp_path)
        for snapshot in await snapshots.find(1 << 40):
            await snapshots.save(msgspec.structs.replace(snapshot, key="scored:another"))
            assert await snapshots.find(1 << 40) == []
            refused.append(snapshot.position)
            assert snapshot.key
        return await peer(role, instance)

    cast = await complete(RECIPE, bus, tmp_path, [50, 90], after_power_came_back)
    await check(cast, bus)
    assert len(refused) >= 2


async def test_rounds_that_the_broker_forgot_are_closed_again(bus: MemoryBus, tmp_path: Path) -> None:
    """The scorer knows rounds as closed, the learner never saw them: neither could go on by itself."""
    cast = Cast(RECIPE, bus.peer("cast", "0"))
    await bus.publish(published(cast.version))
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for part in (cast._designer, cast._agent, cast._server):
                tasks.start_soon(part)
            tasks.start_soon(scorer(RECIPE, bus.peer("scorer", "0"), tmp_path).run)
            snapshots = Snapshots(bus, tmp_path)
            async with bus.follow("SAMPLE", tails=["sample.credit.>"]) as rounds:
                assert [(await anext(rounds)).message.key for _ in range(2)] == ["round:0", "round:1"]
            while not any(_closed(one) for one in await snapshots.find(1 << 40)):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    await bus.purge("SAMPLE", tail="sample.credit.>")
    # A real broker knows no ids but those of the messages that it found on its disk.
    bus._broker.log("SAMPLE").ids.clear()
    await check(await complete(RECIPE, bus, tmp_path, [], await memory_peer(bus)), bus)


def _closed(snapshot: ScorerSnapshot) -> bool:
    return msgspec.msgpack.decode(snapshot.state, type=CurriculumState).closed == 1


async def test_another_host_takes_over_without_the_file(bus: MemoryBus, tmp_path: Path) -> None:
    peer, directories = await memory_peer(bus), iter(range(10))

    async def elsewhere(role: str, instance: str) -> Bus:
        target = tmp_path / f"old{next(directories)}"
        if (tmp_path / "scorer.snapshot").exists():
            (tmp_path / "scorer.snapshot").rename(target)
        return await peer(role, instance)

    await check(await complete(RECIPE, bus, tmp_path, [50, 90], elsewhere), bus)


async def test_a_finished_run_is_extended(bus: MemoryBus, tmp_path: Path) -> None:
    peer = await memory_peer(bus)
    first = await complete(RECIPE, bus, tmp_path, [], peer)
    longer = config(steps=7, curriculum={"lead": 1}, learner={"train_hinted": True})
    assert first.closed[-1].round == 5
    cast = Cast(longer, await peer("cast", "1"), version=first.version, done=6, finals=2)
    draining = anyio.Event()
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scorer(longer, await peer("scorer", "x"), tmp_path, draining).run)
            tasks.start_soon(cast.run)
            await cast.over.wait()
            draining.set()
    assert [c.final for c in cast.closed] == [False] * 5 + [True] + [False] * 2 + [True]
    assert {s.round for s in cast.samples.values() if s.role == "designer"} >= {5, 8}


async def test_a_drain_keeps_what_is_open_for_the_next_start(bus: MemoryBus, tmp_path: Path) -> None:
    recipe, peer = RECIPE, await memory_peer(bus)
    cast = Cast(recipe, await peer("cast", "0"))
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cast.run)
            draining = anyio.Event()
            async with anyio.create_task_group() as first:
                first.start_soon(scorer(recipe, await peer("scorer", "0"), tmp_path, draining).run)
                await until(lambda: len(cast.closed) == 2, bus)
                draining.set()
            assert not any(closed.final for closed in cast.closed)
            draining = anyio.Event()
            async with anyio.create_task_group() as second:
                second.start_soon(scorer(recipe, await peer("scorer", "1"), tmp_path, draining).run)
                await cast.over.wait()
                draining.set()
    await check(cast, bus)


async def test_work_that_its_queue_gave_up_on_fails(bus: MemoryBus, tmp_path: Path) -> None:
    recipe = config(
        steps=1, curriculum={"environments": 1, "rounds_per_window": 1, "delay": 1, "reissues": 1}
    )

    class Poisoned(Cast):
        async def _agent(self) -> None:
            async with self.bus.consume("agent", limit=8) as deliveries:
                async for delivery in deliveries:
                    request = delivery.message
                    assert isinstance(request, EpisodeRequest)
                    if request.index == 0:
                        await delivery.term("it kills every agent")
                        continue
                    await self.bus.publish_all(self.outcome(request, 1.0))
                    await delivery.ack()

    cast = Poisoned(recipe, bus.peer("cast", "0"))
    draining = anyio.Event()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cast.run)
            tasks.start_soon(scorer(recipe, bus.peer("scorer", "0"), tmp_path, draining).run)
            await cast.over.wait()
            draining.set()
    failures = [r.message async for r in bus.replay("EVENT", tails=["event.agent.failed"])]
    assert len(failures) == 4, "two arms, asked twice"
    assert all(isinstance(f, EpisodeFailed) and f.failure == "infra" for f in failures)
    assert cast.closed[0].plays == 1


async def test_a_second_scorer_waits_for_the_first(bus: MemoryBus, tmp_path: Path) -> None:
    first, second = anyio.Event(), anyio.Event()
    one = scorer(RECIPE, bus.peer("scorer", "0"), tmp_path, first)
    two = scorer(RECIPE, bus.peer("scorer", "1"), tmp_path, second)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as leading:
                leading.start_soon(one.run)
                while not one.statistics()["leading"]:
                    await anyio.lowlevel.checkpoint()
                tasks.start_soon(two.run)
                await anyio.wait_all_tasks_blocked()
                assert not two.statistics()["leading"]
                first.set()
            while not two.statistics()["leading"]:
                await anyio.lowlevel.checkpoint()
            second.set()


async def test_facts_that_are_gone_are_an_error(bus: MemoryBus, tmp_path: Path) -> None:
    cast = Cast(RECIPE, bus.peer("cast", "0"))
    await bus.publish(finished(_request(), 1.0))
    await bus.publish(finished(_request("other"), 1.0))
    await bus.purge("EVENT", below=2)
    with pytest.raises(ExceptionGroup) as caught:
        await scorer(RECIPE, cast.bus, tmp_path).run()
    assert caught.group_contains(SpadeError, match="facts 1 to 1")


class Outage(Cast):
    """Nothing can be played: the sandbox is gone."""

    async def _agent(self) -> None:
        async with self.bus.consume("agent", limit=8) as deliveries:
            async for delivery in deliveries:
                assert isinstance(delivery.message, EpisodeRequest)
                await self.bus.publish(lost(delivery.message, "infra"))
                await delivery.ack()


async def test_an_outage_ends_the_run_instead_of_its_rounds(bus: MemoryBus, tmp_path: Path) -> None:
    recipe = config(steps=30, designer={"attempts": 9})
    cast = Outage(recipe, bus.peer("cast", "0"))
    closed: list[int] = []
    for start in range(2):  # the second one goes on behind the lost rounds, and loses two more
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cast.run)
            with anyio.fail_after(20), pytest.raises(ExceptionGroup) as caught:
                await scorer(recipe, bus.peer("scorer", str(start)), tmp_path).run()
            tasks.cancel_scope.cancel()
        assert caught.group_contains(SpadeError, match="2 rounds had no outcome")
        closed.append(sum([r.tail.startswith("sample.credit") async for r in bus.replay("SAMPLE")]))
    assert closed[0] < closed[1] <= 4


def _request(episode: str = "e") -> EpisodeRequest:
    return EpisodeRequest(
        episode=episode,
        design="d",
        environment="",
        arm="plain",
        round=0,
        index=0,
        seed=0,
        source="",
        hint=None,
        max_turns=1,
    )


@asynccontextmanager
async def broker(directory: Path) -> AsyncIterator[tuple[Bus, Peer]]:
    async with serve(directory / "nats", run="test") as server, anyio.create_task_group() as clients:
        await provision(server.url, run="test", token=server.token)

        async def peer(role: str, instance: str) -> Bus:
            ready: list[Bus] = []

            async def hold(*, task_status: anyio.abc.TaskStatus[None]) -> None:
                async with connect(
                    server.url, run="test", role=role, instance=instance, token=server.token
                ) as bus:
                    ready.append(bus)
                    task_status.started()
                    await anyio.sleep_forever()

            await clients.start(hold)
            return ready[0]

        yield await peer("test", "0"), peer
        clients.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_run_over_a_real_broker(tmp_path: Path) -> None:
    async with broker(tmp_path) as (bus, peer):
        cast = await complete(RECIPE, bus, tmp_path, [40, 90], peer)
        await check(cast, bus)
        assert (await bus.stream_info("TASK")).messages == 0
