"""What generated code must not be able to do (reference spec sandbox, section 7, cases 1-12, 16, 24)."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import stat
from pathlib import Path

import pytest
from scenes.programs import ECHO, attack
from scenes.sandboxes import alive, held_pool

from sandbox import EnvMemory, EnvViolation, SandboxPool, SandboxSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILES = {
    "open": 'return tried(lambda: open("/etc/passwd").read(10))',
    "os.open": 'return tried(lambda: os.open("/etc/passwd", os.O_RDONLY))',
    "openat": 'return tried(lambda: raw((257, 56), -100, b"/etc/passwd", 0, 0))',
    "openat2": 'return tried(lambda: raw((437, 437), -100, b"/etc/passwd", b"\\0" * 24, 24))',
    "listdir": 'return tried(lambda: os.listdir("/"))',
    "proc": 'return tried(lambda: open("/proc/self/environ").read())',
    "stat": 'return tried(lambda: os.stat("/etc"))',
    "write": 'return tried(lambda: open("/tmp/spade-attack", "w"))',
    "cwd": 'return tried(lambda: open("attack", "w"))',
    "mkdir": 'return tried(lambda: os.mkdir("/tmp/spade-attack-dir"))',
}
NETWORK = {
    "socketpair": 'import socket\nreturn tried(lambda: raw((53, 199), 1, 1, 0, b"\\0" * 8))',
    "socket": "return tried(lambda: raw((41, 198), 2, 1, 0))",
    "send a descriptor": "return tried(lambda: raw((46, 211), 3, b'\\0' * 56, 0))",
}
PROCESSES = {
    "system": 'return tried(lambda: os.system("true")) if os.system("true") == 0 else "denied:status"',
    "execve": 'return tried(lambda: os.execv("/bin/true", ["true"]))',
    "fork": "return tried(os.fork)",
    "clone": "return tried(lambda: raw((56, 220), 17, 0, 0, 0, 0))",
    "clone3": "return tried(lambda: raw((435, 435), b'\\0' * 88, 88))",
    "fork bomb": "outcomes = {tried(os.fork) for _ in range(200)}\nreturn sorted(outcomes)[0]",
    "kill parent": "return tried(lambda: raw((62, 129), raw((110, 173)), 9))",
    "kill all": "return tried(lambda: raw((62, 129), -1, 9))",
    "stop self": "return tried(lambda: raw((62, 129), raw((39, 172)), 19))",
    "pidfd": "return tried(lambda: raw((434, 434), raw((110, 173)), 0))",
}
MEMORY = {
    "executable": "import mmap\nreturn tried(lambda: raw((9, 222), 0, 4096, 5, 0x22, -1, 0))",
    "mprotect": """
        p = raw((9, 222), 0, 4096, 3, 0x22, -1, 0)
        return tried(lambda: raw((10, 226), p, 4096, 7))
    """,
    "callback": "return tried(lambda: ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)())",
    "shared": "return tried(lambda: raw((9, 222), 0, 1 << 30, 3, 0x21, -1, 0))",
    "memfd": 'return tried(lambda: raw((319, 279), b"x", 0))',
    "shm": "return tried(lambda: raw((29, 194), 0, 1 << 30, 0o1600))",
    "one shot": "return tried(lambda: bytearray(20 << 30))",
    "numpy": "import numpy\nreturn tried(lambda: numpy.ones(1 << 32))",
}
PRIVILEGE = {
    "setuid": "return tried(lambda: os.setuid(0))",
    "undo no_new_privs": "return tried(lambda: raw((157, 167), 38, 0, 0, 0, 0))",
    "dumpable": "return tried(lambda: raw((157, 167), 4, 1, 0, 0, 0))",
    "second filter": "return tried(lambda: raw((317, 277), 1, 0, b'\\0' * 16))",
    "raise limits": "import resource\nreturn tried(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))",
    "nice": "return tried(lambda: os.nice(-10))",
    "affinity": "return tried(lambda: os.sched_setaffinity(0, {0}))",
    "duplicate": "return tried(lambda: os.dup(3))",
}
DENIED = FILES | NETWORK | PROCESSES | MEMORY | PRIVILEGE

KILLED = {
    "ptrace": "raw((101, 117), 16, raw((110, 173)), 0, 0)",
    "process_vm_readv": "raw((310, 270), raw((110, 173)), 0, 0, 0, 0, 0)",
    "pidfd_getfd": "raw((438, 438), 3, 3, 0)",
    "unshare": "raw((272, 97), 0x10000000)",
    "mount": "raw((165, 40), b'none', b'/', b'tmpfs', 0, 0)",
    "setns": "raw((308, 268), 3, 0)",
    "bpf": "raw((321, 280), 0, 0, 0)",
    "io_uring": "raw((425, 425), 8, 0)",
    "userfaultfd": "raw((323, 282), 0)",
    "keyctl": "raw((250, 219), 0, 0)",
    "perf": "raw((298, 241), 0, 0, -1, -1, 0)",
    "chroot": "raw((161, 51), b'/')",
}
if os.uname().machine == "x86_64":
    KILLED["x32"] = "raw((0x40000000 | 39, 0))"


async def outcome(pool: SandboxPool, body: str) -> str:
    async with await pool.spawn(attack(body)) as instance:
        return (await instance.step("go")).observation


@pytest.mark.parametrize("name", DENIED)
async def test_denied_with_an_error(pool: SandboxPool, name: str) -> None:
    assert (await outcome(pool, DENIED[name])).startswith("denied:")


@pytest.mark.parametrize("name", KILLED)
async def test_killed_for_what_only_attacks_do(pool: SandboxPool, name: str) -> None:
    async with await pool.spawn(attack(f"return tried(lambda: {KILLED[name]})")) as instance:
        with pytest.raises(EnvViolation):
            await instance.step("go")
        assert not alive(instance.pid)


async def test_neighbour_goes_on(pool: SandboxPool) -> None:
    async with await pool.spawn(ECHO) as neighbour:
        attacks = [asyncio.create_task(outcome(pool, body)) for body in (PROCESSES | MEMORY).values()]
        for turn in range(1, 60):
            assert (await neighbour.step("on")).observation == f"{turn} on"
        assert all(result.startswith("denied:") for result in await asyncio.gather(*attacks))


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
    """Whether ``text`` lies in writable memory of ``pid``."""
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


async def test_threads_fail_softly(pool: SandboxPool) -> None:
    body = """
    import threading
    failed = 0
    for _ in range(500):
        try:
            threading.Thread(target=time.sleep, args=(1,)).start()
        except RuntimeError:
            failed += 1
    return failed
    """
    async with await pool.spawn(attack(body)) as instance:
        assert (await instance.step("go")).observation == "500"
        assert (await instance.step("again")).observation == "500"


async def test_memory_bomb_in_pieces(pool: SandboxPool) -> None:
    async with await pool.spawn(attack("keep = []\nwhile True: keep.append(bytearray(1 << 20))")) as instance:
        with pytest.raises(EnvMemory):
            await instance.step("go")


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
