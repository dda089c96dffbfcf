"""The recorder: the database follows the stream."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from scenes.memory_bus import MemoryBus
from scenes.small_run import batch, finished, policy

from bus.messages import Heartbeat
from engine.errors import SpadeError
from engine.records import history
from engine.records import status as standing
from engine.records.recorder import Recorder
from engine.records.status import RunStatus


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
