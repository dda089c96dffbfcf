"""Presence of role instances: entries that expire."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import msgspec
import pytest
from bus_trouble import over_nats
from bus_worlds import World, nats_world, take

from bus import Bus, codec, connect, presence, provision, serve
from bus.messages import RoleBye, RoleHello

Worlds = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(presence, "EXPIRY_SECONDS", 1.0)


def hello(role: str, instance: str, **more: object) -> RoleHello:
    return RoleHello(role=role, instance=instance, since=1_800_000_000_000_000_000, **more)


async def names(bus: Bus) -> list[tuple[str, str]]:
    return [(one.hello.role, one.hello.instance) for one in await bus.present()]


async def until_there(bus: Bus, wanted: list[tuple[str, str]], seconds: float = 5.0) -> None:
    found: list[tuple[str, str]] = []
    with anyio.move_on_after(seconds):
        while (found := await names(bus)) != wanted:  # noqa: ASYNC110 (an expiry has no event)
            await anyio.sleep(0.02)
        return
    raise AssertionError(f"{found} are there, not {wanted}")


async def test_who_is_announced_is_there_until_it_leaves(world: Worlds) -> None:
    async with world() as w, w.peer("agent", "two") as other:
        assert await w.bus.present() == []
        mine = hello("designer", "one", slots=8, version=3, capabilities=("sandbox", "pool"))
        async with other.listen("hello.>") as arriving, other.listen("bye.>") as leaving:
            async with w.bus.announce(mine):
                async with other.announce(hello("agent", "two", slots=64)):
                    assert await names(w.bus) == [("agent", "two"), ("designer", "one")]
                    came = await take(arriving, 2)
                    # two connections: nothing says whose message comes first
                    assert {one.role: one for one in came} == {
                        "designer": mine,
                        "agent": hello("agent", "two", slots=64),
                    }
                (one,) = await other.present()
                assert one.hello == mine
                assert 0.0 <= one.age < 5.0
                assert one.seen > 1_700_000_000
            assert await w.bus.present() == []
            byes = await take(leaving, 2)
            assert {(bye.role, bye.instance) for bye in byes} == {("agent", "two"), ("designer", "one")}
            assert all(isinstance(bye, RoleBye) for bye in byes)


@pytest.mark.usefixtures("quick")
async def test_what_is_said_is_renewed_and_brought_up_to_date(world: Worlds) -> None:
    async with world() as w:
        first = hello("server", "gpu-0", version=1)
        async with w.bus.announce(first) as announcement:
            announcement.update(msgspec.structs.replace(first, version=2, state="draining"))
            with anyio.fail_after(5):
                while (await w.bus.present())[0].hello.version != 2:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            (one,) = await w.bus.present()
            assert one.hello.state == "draining"
            assert one.age < 1.0


@pytest.mark.usefixtures("quick")
async def test_who_was_killed_is_forgotten_after_its_time(nats_url: str) -> None:
    async with nats_world(nats_url) as w:
        frame = codec.encode(hello("agent", "dead"), run="r", role="agent", instance="dead")
        await over_nats(w)._state.put(presence.BUCKET, "agent.dead", frame, ttl=60.0)
        async with w.bus.announce(hello("agent", "alive")):
            assert await names(w.bus) == [("agent", "alive"), ("agent", "dead")]
            await until_there(w.bus, [("agent", "alive")])


async def test_an_entry_of_another_version_is_left_out(nats_url: str) -> None:
    async with nats_world(nats_url) as w:
        frame = msgspec.msgpack.decode(codec.encode(hello("a", "b"), run="r", role="a", instance="b"))
        frame[1] = frame[8]["kind"] = "role_hello.v2"
        await over_nats(w)._state.put(presence.BUCKET, "a.b", msgspec.msgpack.encode(frame), ttl=60.0)
        await over_nats(w)._state.put(presence.BUCKET, "a.c", b"no frame", ttl=60.0)
        async with w.bus.announce(hello("agent", "Ä odd name!")):
            assert await names(w.bus) == [("agent", "Ä odd name!")]


@pytest.mark.usefixtures("quick")
async def test_an_announcement_outlives_the_broker(tmp_path: Path) -> None:
    async with serve(tmp_path, run="presence", store_gb=0.25) as handle:
        await provision(handle.url, run="presence", token=handle.token, store_gb=0.25)
        joining = {"run": "presence", "token": handle.token, "role": "x"}
        async with connect(handle.url, instance="1", **joining) as bus, bus.announce(hello("x", "1")):
            os.kill(handle.pid, signal.SIGKILL)
            with anyio.fail_after(10):
                while handle.restarts == 0:  # noqa: ASYNC110 (the handle is what a user can look at)
                    await anyio.sleep(0.01)
            async with connect(handle.url, instance="2", **joining) as other:
                await until_there(other, [("x", "1")])
                age = (await other.present())[0].age
                assert age < 1.0
