"""The recorder: the database follows the stream, and the note of serving versions equals its facts."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes.memory_bus import MemoryBus
from scenes.small_run import batch, evaluation, events, finished, policy, serving

from bus.messages import Heartbeat, Message, ServerLost
from engine.errors import SpadeError
from engine.inference.pool import InferencePool
from engine.records import history, served_versions
from engine.records import status as standing
from engine.records.recorder import Recorder
from engine.records.served_versions import ServedVersions
from engine.records.status import RunStatus
from roles.evaluator.agenda import Agenda


def supervisor_bus() -> MemoryBus:
    return MemoryBus(run="toy", role="supervisor", instance="s")


def status_of(path: Path) -> RunStatus:
    connection = history.open_for_reading(path)
    try:
        return standing.read(connection)
    finally:
        connection.close()


async def record(bus: MemoryBus, path: Path) -> None:
    """One life of a recorder, to the end of what is in the stream."""
    recorder = Recorder(bus, path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.run)
        assert await recorder.caught_up(10)
        tasks.cancel_scope.cancel()
    assert recorder.statistics()["queued"] == 0
    recorder.close()


async def test_each_event_is_recorded_once_over_two_lives(tmp_path: Path) -> None:
    bus, path = supervisor_bus(), tmp_path / "run.db"
    await bus.publish(policy(0))
    await bus.publish_all(finished(f"e{index}") for index in range(700))
    await record(bus, path)
    await bus.publish_all(finished(f"e{index}") for index in range(650, 720))
    await bus.publish(batch(0, 1))
    await record(bus, path)
    state = status_of(path)
    assert (state.episodes_finished, state.step) == (720, 1)
    assert state.events == (await bus.stream_info("EVENT")).last


async def test_the_last_heartbeats_are_kept(tmp_path: Path) -> None:
    bus, path = supervisor_bus(), tmp_path / "run.db"
    recorder = Recorder(bus, path)
    beat = Heartbeat(role="agent", instance="agent-0", state="running", statistics={"queue": 2.0})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.run)
        await bus.publish(policy(0))
        assert await recorder.caught_up(10)
        await bus.peer("agent", "agent-0").publish(beat)
        await anyio.wait_all_tasks_blocked()
        assert await recorder.caught_up(10)
        tasks.cancel_scope.cancel()
    recorder.close()
    assert status_of(path).gauges == {"agent/agent-0": {"queue": 2.0}}


async def test_a_database_that_cannot_be_written_ends_the_recorder(tmp_path: Path) -> None:
    bus, path = supervisor_bus(), tmp_path / "run.db"
    recorder = Recorder(bus, path)
    recorder.close()
    await bus.publish(policy(0))
    with pytest.RaisesGroup(pytest.RaisesExc(SpadeError, match="cannot be written")):
        await recorder.run()


def test_a_database_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    bus = supervisor_bus()
    with pytest.raises(SpadeError, match="run\\.db cannot be written"):
        Recorder(bus, tmp_path / "missing" / "run.db")


def lost(server: str = "server-0", epoch: str = "e1") -> ServerLost:
    return ServerLost(server=server, epoch=epoch, reason="gone")


names, epochs = st.sampled_from(["server-0", "server-1"]), st.sampled_from(["e1", "e2"])
facts = st.one_of(
    st.builds(
        lambda step, server, epoch: serving(step, server=server, epoch=epoch),
        st.integers(0, 9),
        names,
        epochs,
    ),
    st.builds(lost, names, epochs),
)


def agenda(messages: list[Message]) -> Agenda:
    made = Agenda(["mid"], 1)
    for message in messages:
        made.note(message)
    return made


@given(st.lists(facts, max_size=12), st.integers(0, 12))
def test_a_note_and_the_rest_are_the_whole(messages: list[Message], cut: int) -> None:
    connection = history.create(Path(":memory:"))
    history.apply(connection, events(messages[:cut]))
    note = served_versions.current(connection)
    connection.close()
    assert note.position == len(messages[:cut])
    short, whole = agenda([*note.facts, *messages[note.position :]]), agenda(messages)
    assert short.serving == whole.serving


async def test_the_recorder_writes_it_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_versions, "EVERY", 10)
    bus = supervisor_bus()
    recorder = Recorder(bus, tmp_path / "run.db")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.run)
        await bus.publish_all([policy(0), serving(0), serving(0, server="server-1"), lost()])
        assert await recorder.caught_up(10)
        assert await served_versions.read(bus) == ServedVersions()
        await bus.publish_all([finished(f"e{number}") for number in range(20)])
        assert await recorder.caught_up(10)
        with anyio.fail_after(10):
            while (note := await served_versions.read(bus)) == ServedVersions():
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    recorder.close()
    assert note.position >= 10
    assert [one.server for one in note.facts] == ["server-1"]


async def test_a_note_that_does_not_fit_is_not_used() -> None:
    bus = supervisor_bus()
    await served_versions.write(bus, ServedVersions(position=3, facts=(serving(1),)))
    assert await served_versions.read(bus) == ServedVersions()
    await bus.publish_all([serving(0), serving(1), serving(2)])
    assert (await served_versions.read(bus)).position == 3
    await bus.state_put(served_versions.KEY, b"junk")
    assert await served_versions.read(bus) == ServedVersions()


async def test_the_pool_needs_the_note_and_what_came_after_it() -> None:
    bus = supervisor_bus()
    await bus.publish_all([serving(1), serving(1, server="server-1"), evaluation(1)])
    await served_versions.write(
        bus, ServedVersions(position=3, facts=(serving(1), serving(1, server="server-1")))
    )
    await bus.purge("EVENT", below=4)
    await bus.publish_all([lost("server-1"), serving(2)])
    pool = InferencePool(max_concurrency=1, request_seconds=1.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.watch, bus)
        with anyio.fail_after(10):
            while pool.versions() != {"server-0": 2}:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
