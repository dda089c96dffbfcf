"""Acts that generated code must not be able to perform (docs/sandbox.md, cases 1-12, 16, 24)."""

from __future__ import annotations

import os
import secrets
import socket
import stat
from pathlib import Path

import pytest
from scenes.programs import ECHO, attack
from scenes.sandboxes import held_pool

from sandbox import SandboxPool, SandboxSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def outcome(pool: SandboxPool, body: str) -> str:
    async with await pool.spawn(attack(body)) as instance:
        return (await instance.step("go")).observation


def _victim(directory: Path) -> Path:
    """A file that everybody may write and delete."""
    victim = directory / "victim"
    victim.write_text("intact")
    for path in (directory, victim):
        path.chmod(stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
    return victim


async def test_victim_file_stays(pool: SandboxPool, tmp_path: Path) -> None:
    victim = _victim(tmp_path)
    body = (
        f'return tried(lambda: os.unlink({str(victim)!r})) + tried(lambda: os.rename({str(victim)!r}, "/x"))'
    )
    result = await outcome(pool, body)
    assert "OPEN" not in result
    assert victim.read_text() == "intact"


@pytest.mark.skipif(os.geteuid() != 0, reason="reading another process's memory needs root")
async def test_secret_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, marker = secrets.token_bytes(16).hex(), secrets.token_bytes(16).hex()
    monkeypatch.setenv("SPADE_BUS_TOKEN", secret)
    async with held_pool(SandboxSettings()) as pool:
        source = ECHO.replace("self.t = 0", f"self.t = 0; self.marker = '{marker}' * 2")
        async with await pool.spawn(source) as instance:
            # that the marker is found shows that the search can find something
            assert _occurs(instance.pid, marker * 2)
            assert not _occurs(instance.pid, secret)


def _occurs(pid: int, text: str) -> bool:
    """Return whether ``text`` lies in writable memory of ``pid``."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            if not rights.startswith("rw"):
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            memory.seek(start)
            if text.encode() in memory.read(end - start):
                return True
    return False


async def test_listener_hears_nothing(pool: SandboxPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        for server in (tcp, udp):
            server.setblocking(False)
        body = f"""
        import _socket
        def reach(kind, port):
            s = _socket.socket(2, kind)
            s.connect(("127.0.0.1", port))
            s.send(b"x")
        ports = {(tcp.getsockname()[1], udp.getsockname()[1])}
        return tried(lambda: reach(1, ports[0])) + tried(lambda: reach(2, ports[1]))
        """
        result = await outcome(pool, body)
        assert "OPEN" not in result
        with pytest.raises(BlockingIOError):
            tcp.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(1)


async def test_siblings_have_their_own_uid(pool: SandboxPool) -> None:
    if pool.report.uid_mode != "own":
        pytest.skip("this host gives instances no uid of their own")
    async with await pool.spawn(ECHO) as one, await pool.spawn(ECHO) as other:
        owners = {int(_status(instance.pid)["Uid"].split()[0]) for instance in (one, other)}
        assert len(owners) == 2
        assert os.getuid() not in owners


async def test_child_holds_nothing(pool: SandboxPool) -> None:
    async with await pool.spawn(ECHO) as instance:
        status = _status(instance.pid)
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert status["Threads"] == "1"


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
