"""The note of who serves: the same as all the facts that led to it."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes.memory_bus import MemoryBus
from scenes.small_run import evaluation, events, finished, policy
from scenes.small_run import serving as fact

from bus.messages import Message, ServerLost
from engine.inference.pool import InferencePool
from engine.records import history, served_versions
from engine.records.recorder import Recorder
from engine.records.served_versions import ServedVersions
from roles.evaluator.agenda import Agenda


def lost(server: str = "server-0", epoch: str = "e1") -> ServerLost:
    return ServerLost(server=server, epoch=epoch, reason="gone")


def bus_of_tests() -> MemoryBus:
    return MemoryBus(run="toy", role="supervisor", instance="s")


names, epochs = st.sampled_from(["server-0", "server-1"]), st.sampled_from(["e1", "e2"])
facts = st.one_of(
    st.builds(
        lambda step, server, epoch: fact(step, server=server, epoch=epoch), st.integers(0, 9), names, epochs
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
    bus = bus_of_tests()
    recorder = Recorder(bus, tmp_path / "run.db")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.run)
        await bus.publish_all([policy(0), fact(0), fact(0, server="server-1"), lost()])
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
    bus = bus_of_tests()
    await served_versions.write(bus, ServedVersions(position=3, facts=(fact(1),)))
    assert await served_versions.read(bus) == ServedVersions()
    await bus.publish_all([fact(0), fact(1), fact(2)])
    assert (await served_versions.read(bus)).position == 3
    await bus.state_put(served_versions.KEY, b"junk")
    assert await served_versions.read(bus) == ServedVersions()


async def test_the_pool_needs_the_note_and_what_came_after_it() -> None:
    bus = bus_of_tests()
    await bus.publish_all([fact(1), fact(1, server="server-1"), evaluation(1)])
    await served_versions.write(bus, ServedVersions(position=3, facts=(fact(1), fact(1, server="server-1"))))
    await bus.purge("EVENT", below=4)
    await bus.publish_all([lost("server-1"), fact(2)])
    pool = InferencePool(max_concurrency=1, request_seconds=1.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.watch, bus)
        with anyio.fail_after(10):
            while pool.versions() != {"server-0": 2}:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
