"""A whole run over a bus: a real scorer among scripted roles, with crashes in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from scenes.memory_bus import MemoryBus
from scenes.scorer_cast import Cast, scorer, text_of
from scenes.scorer_world import config, finished, lost, published
from scenes.small_run import request

from bus import Bus, codec, connect, provision, serve
from bus.messages import (
    DesignFailed,
    DesignRejected,
    EnvironmentReady,
    EpisodeFailed,
    EpisodeRequest,
    RoundClosed,
    RoundSummary,
)
from bus.server import ServerHandle
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


async def finish(cast: Cast, bus: MemoryBus, directory: Path, *, seconds: float = 20) -> None:
    """Run ``cast`` and one scorer to the end."""
    draining = anyio.Event()
    with anyio.fail_after(seconds):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cast.run)
            tasks.start_soon(scorer(cast.config, bus.peer("scorer", "0"), directory, draining).run)
            await cast.over.wait()
            draining.set()


async def _kill_at(bus: Bus, sequence: int, life: anyio.CancelScope) -> None:
    async with bus.follow("EVENT") as records:
        async for record in records:
            if record.sequence >= sequence:
                life.cancel()
                return


async def check(cast: Cast, bus: Bus) -> None:
    """Check a whole run, however often the scorer died."""
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


@pytest.mark.parametrize("lost", ["both", "file"])
async def test_a_lost_snapshot_costs_nothing_but_time(bus: MemoryBus, tmp_path: Path, lost: str) -> None:
    """Without the file another host takes over by the copy on the bus; without both all facts are read."""
    peer = await memory_peer(bus)

    async def forgetful(role: str, instance: str) -> Bus:
        if lost == "both":
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


class Poisoned(Cast):
    """Deliveries that kill their consumer: all tickets of several designs, and the first play of each arm."""

    async def _designer(self) -> None:
        if self.config.designer.designs_per_ticket == 1:
            await super()._designer()
            return
        async with self.bus.consume("designer", limit=4) as deliveries:
            async for delivery in deliveries:
                self.work[delivery.message.key] += 1
                await delivery.term("it kills every designer")

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


async def test_work_that_its_queue_gave_up_on_fails(bus: MemoryBus, tmp_path: Path) -> None:
    recipe = config(
        steps=1, curriculum={"environments": 1, "rounds_per_window": 1, "delay": 1, "reissues": 1}
    )
    cast = Poisoned(recipe, bus.peer("cast", "0"))
    await finish(cast, bus, tmp_path)
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
    await bus.publish(finished(request(1), 1.0))
    await bus.publish(finished(request(2), 1.0))
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


@asynccontextmanager
async def broker(directory: Path, **options: Any) -> AsyncIterator[tuple[ServerHandle, Peer]]:
    async with (
        serve(directory / "nats", run="test", **options) as server,
        anyio.create_task_group() as clients,
    ):
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

        yield server, peer
        clients.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_run_over_a_real_broker(tmp_path: Path) -> None:
    async with broker(tmp_path) as (_, peer):
        bus = await peer("test", "0")
        cast = await complete(RECIPE, bus, tmp_path, [40, 90], peer)
        await check(cast, bus)
        assert (await bus.stream_info("TASK")).messages == 0


# --- Outcomes that the bus has forgotten before the scorer read them: no round waits for them ---


class Forgetful(Cast):
    """Every seventh outcome is evicted from the stream before it is read."""

    plays = 0

    async def _agent(self) -> None:
        assert isinstance(self.bus, MemoryBus)
        async with self.bus.consume("agent", limit=8) as deliveries:
            async for delivery in deliveries:
                request = delivery.message
                assert isinstance(request, EpisodeRequest)
                won = float(self._luck("won", request.episode) < 0.5)
                sample, outcome = self.outcome(request, won)
                await self.bus.publish(sample)
                self.plays += 1
                if self.plays % 7 == 0:
                    frame = codec.encode(outcome, run="test", role="agent", instance="0")
                    sequence = self.bus.inject("EVENT", outcome.tail, frame, outcome.key)
                    del self.bus._broker.log("EVENT").messages[sequence]
                else:
                    await self.bus.publish(outcome)
                await delivery.ack()


async def test_no_round_waits_for_what_was_forgotten(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roles.scorer.role._MEND_SECONDS", 0.2, raising=False)
    cast = Forgetful(RECIPE, bus.peer("cast", "0"))
    await finish(cast, bus, tmp_path, seconds=40)
    facts = [record.message async for record in bus.replay("EVENT")]
    lost = [fact for fact in facts if isinstance(fact, EpisodeFailed)]
    assert len({fact.episode for fact in lost}) == len(lost) >= cast.plays // 7 - 2
    assert {fact.failure for fact in lost} == {"infra"}
    assert len([fact for fact in facts if isinstance(fact, RoundSummary)]) == RECIPE.run.steps


# --- A real scorer with tickets of several designs: whole runs, and tickets that nobody can answer


GROUPED = config(
    steps=3,
    curriculum={"environments": 4, "rounds_per_window": 1, "delay": 2, "lead": 1},
    designer={"designs_per_ticket": 2, "attempts": 3},
    learner={"designer": {"max_staleness": 64, "normalise": "zscore", "scope": "group"}},
)


@pytest.mark.parametrize("crashes", [[], [4, 5, 40]])
async def test_groups_are_trained_together(bus: MemoryBus, tmp_path: Path, crashes: list[int]) -> None:
    cast = await complete(GROUPED, bus, tmp_path, crashes, await memory_peer(bus))
    await check(cast, bus)
    tickets = [key for key in cast.work if key.startswith("ticket:")]
    assert len(tickets) == GROUPED.run.steps * 4 // 2
    groups: dict[str, list[float]] = {}
    for sample in cast.samples.values():
        if sample.role == "designer":
            groups.setdefault(sample.credit.group, []).append(sample.credit.advantage)
    assert len(groups) == len(tickets)
    assert all(abs(sum(advantages)) < 1e-6 for advantages in groups.values())
    assert any(max(advantages) > 0 for advantages in groups.values())


async def test_a_group_that_its_queue_gave_up_on_fails_as_a_whole(bus: MemoryBus, tmp_path: Path) -> None:
    recipe = config(
        steps=1,
        curriculum={"environments": 2, "rounds_per_window": 1, "delay": 1, "reissues": 1},
        designer={"designs_per_ticket": 2, "skills": ["Logic"]},
    )
    cast = Poisoned(recipe, bus.peer("cast", "0"))
    await finish(cast, bus, tmp_path)
    failures = [r.message async for r in bus.replay("EVENT", tails=["event.designer.failed"])]
    told = [(f.design, f.issue, f.failure) for f in failures if isinstance(f, DesignFailed)]
    assert sorted(issue for _, issue, _ in told) == [0, 0, 1, 1]
    assert len({design for design, _, _ in told}) == 2
    assert {failure for _, _, failure in told} == {"infra"}
    assert sorted(cast.work.values()) == [1, 1], "the ticket, and once again"
    assert [closed.plays for closed in cast.closed] == [0, 0]


# --- Designs that wait for their round: whatever dies in between, they are trained in it, once --


Effect = dict[str, tuple[int, float]]


def delayed(delay: int, **curriculum: Any) -> Config:
    table = {"rounds_per_window": 2, "delay": delay, "lead": 1, "environments": 2, "hinted_plays": 1}
    return config(steps=6, curriculum=table | curriculum)


def effects(cast: Cast) -> Effect:
    """Return round and advantage of everything that was credited, by its tokens."""
    return {text_of(sample): (sample.round, sample.credit.advantage) for sample in cast.samples.values()}


async def undisturbed(table: Config, directory: Path) -> Effect:
    await anyio.Path(directory).mkdir()
    bus = MemoryBus(run="test", role="test", instance="0")
    return effects(await complete(table, bus, directory, [], await memory_peer(bus)))


@pytest.mark.parametrize(
    ("delay", "crashes"), [(0, [12, 30, 31, 55]), (4, [12, 30, 31, 55]), (5, [20, 21, 22, 60, 70])]
)
async def test_delayed_designs_fire_in_their_round(delay: int, crashes: list[int], tmp_path: Path) -> None:
    table = delayed(delay)
    bus = MemoryBus(run="test", role="test", instance="0")
    cast = await complete(table, bus, tmp_path, crashes, await memory_peer(bus))
    await check(cast, bus)
    assert effects(cast) == await undisturbed(table, tmp_path / "whole")
    rounds = {sample.round for sample in cast.samples.values() if sample.role == "designer"}
    assert rounds == {*range(max(0, delay - 1), 7)}
    assert max(cast.work.values()) == 1, "what is answered is not asked again"


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_they_do_on_a_broker_that_is_killed_too(tmp_path: Path) -> None:
    """Kill -9 of the broker when designs are held, and when they are due; of the scorer around that."""
    table = delayed(4, plays_per_round=3)
    async with broker(tmp_path, sync="always") as (server, peer), anyio.create_task_group() as clients:
        killed: list[int] = []

        async def kill_broker() -> None:
            """After rounds 1 (windows close, designs wait) and 3 (designs are in the batch)."""
            async with watcher.follow("SAMPLE", tails=["sample.credit.>"]) as records:
                async for record in records:
                    assert isinstance(record.message, RoundClosed)
                    if record.message.round in (1, 3):
                        killed.append(server.pid)
                        os.kill(server.pid, signal.SIGKILL)

        watcher = await peer("test", "watcher")
        clients.start_soon(kill_broker)
        with anyio.fail_after(150):
            cast = await complete(table, await peer("test", "0"), tmp_path, [20, 45, 46, 80], peer)
        await check(cast, await peer("test", "1"))
        assert len(set(killed)) == 2
        clients.cancel_scope.cancel()
    assert effects(cast) == await undisturbed(table, tmp_path / "whole")
