"""Designs that wait for their round: whatever dies in between, they are trained in it, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from scenes.memory_bus import MemoryBus
from scenes.scorer_cast import Cast, text_of
from scenes.scorer_world import config
from test_scorer_role import check, complete, memory_peer

from bus import Bus, connect, provision, serve
from bus.messages import RoundClosed
from engine.config import Config

Effect = dict[str, tuple[int, float]]


def recipe(delay: int, **curriculum: Any) -> Config:
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
    table = recipe(delay)
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
    table = recipe(4, plays_per_round=3)
    async with serve(tmp_path / "nats", run="test", sync="always") as server:
        await provision(server.url, run="test", token=server.token)
        async with anyio.create_task_group() as clients:

            async def peer(role: str, instance: str) -> Bus:
                made: list[Bus] = []

                async def hold(*, task_status: anyio.abc.TaskStatus[None]) -> None:
                    login = {"run": "test", "role": role, "instance": instance, "token": server.token}
                    async with connect(server.url, **login) as bus:
                        made.append(bus)
                        task_status.started()
                        await anyio.sleep_forever()

                await clients.start(hold)
                return made[0]

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
