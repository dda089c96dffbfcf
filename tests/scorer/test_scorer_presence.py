"""Servers whose role has gone without a word: taken for lost, or the run would wait for them for ever."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from scenes.memory_bus import MemoryBus
from scenes.scorer_cast import scorer
from scenes.scorer_world import config, published, serving

import roles.scorer.role as scorer_role
from bus.messages import DesignTicket, Heartbeat, ServerLost
from engine.lineage import Version
from roles.scorer.pacing import HeartbeatWatch, KnownServer

SERVERS = {"far-0": KnownServer("e1", 1), "far-1": KnownServer("e2", 1), "near-a-0": KnownServer("e3", 1)}


def test_silence_of_a_role_is_the_loss_of_its_servers() -> None:
    presence = HeartbeatWatch(patience=3)
    for tick in range(3):
        presence.heard("near-a")
        if tick == 0:
            presence.heard("far")
        assert presence.tick(SERVERS) == {}
    presence.heard("near-a")
    assert presence.tick(SERVERS) == {"far-0": "e1", "far-1": "e2"}


def test_a_heartbeat_ends_the_silence() -> None:
    presence = HeartbeatWatch(patience=2)
    for tick in range(6):
        presence.heard("near-a")
        if tick % 2:
            presence.heard("far")
        assert presence.tick(SERVERS) == {}


def test_silence_of_everybody_is_the_bus() -> None:
    presence = HeartbeatWatch(patience=2)
    assert [presence.tick(SERVERS) for _ in range(9)] == [{}] * 9


async def test_a_run_does_not_wait_for_a_server_whose_role_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``far`` keeps the version of an abandoned branch for ever: no round is admitted until it is lost."""
    monkeypatch.setattr(scorer_role, "TICK_SECONDS", 0.01)
    bus = MemoryBus(run="test", role="test", instance="0")
    for message in (
        published(Version(0, 0)),
        published(Version(0, 3)),
        published(Version(1, 2)),
        serving("far-0", Version(0, 3)),
        serving("near-0", Version(1, 2)),
    ):
        await bus.publish(message)

    async def beat() -> None:
        while True:
            beating = Heartbeat(role="server", instance="near", state="running", statistics={})
            await bus.publish(beating)
            await anyio.sleep(0.002)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scorer(config(steps=2), bus.peer("scorer", "0"), tmp_path).run)
        await anyio.wait_all_tasks_blocked()
        assert (await bus.stream_info("TASK")).messages == 0
        tasks.start_soon(beat)
        with anyio.fail_after(10):
            async with bus.consume("designer", limit=1) as tickets:
                assert isinstance((await anext(tickets)).message, DesignTicket)
        lost = [r.message async for r in bus.replay("EVENT", tails=["event.server.lost"])]
        assert [(m.server, m.epoch) for m in lost if isinstance(m, ServerLost)] == [("far-0", "e0")]
        tasks.cancel_scope.cancel()
