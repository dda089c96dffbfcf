"""A private nats-server: started, watched, restarted on its port, stopped.

The store directory has one owner (two servers on one store lose acknowledged messages), the configuration
with the token is readable by the owner only, and the server dies with the process that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import anyio

from bus.broker_files import jetstream_settings
from bus.concurrency import flat_task_group
from bus.connection import open_connection
from bus.errors import BusError, BusUnavailable
from bus.keys import write_private
from bus.server_binary import locate
from bus.subjects import Names

log = logging.getLogger("spade.bus")
_READY_SECONDS = 20.0
_READ_BYTES_PER_SECOND = 50e6
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.01
_HEALTH_SECONDS = 2.0
_BACKOFF = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
_YOUNG_SECONDS = 2.0
_CRASHES, _CRASH_SECONDS = 6, 120.0
_TAIL_LINES = 12
_FULL_DISK = ("no space left on device", "disk quota exceeded", "JetStream out of")
_PORT_TAKEN = "address already in use"

# Runs as its own program between us and the server: no Python code runs between fork and exec here.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, binary, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
os.execv(binary, arguments)
"""


@dataclass
class ServerHandle:
    """A running server. ``token`` belongs to the URL; ``pid`` changes when the server is restarted."""

    url: str
    token: str = field(repr=False)
    pid: int
    restarts: int = 0


class _Files:
    """The paths in the server's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config, self.log, self.errors = (directory / f"nats.{end}" for end in ("conf", "log", "err"))
        self.lock, self.port, self.token, self.store = (
            directory / name for name in ("lock", "port", "token", "store")
        )

    def ports(self) -> list[Path]:
        return list(self.directory.glob("nats-server_*.ports"))

    def tail(self, since: int = 0) -> str:
        """Return the last lines of the log and of the server's standard error."""
        lines: list[str] = []
        for path, start in ((self.log, since), (self.errors, 0)):
            if path.exists():
                with path.open(errors="replace") as file:
                    file.seek(start)
                    lines += deque(file, _TAIL_LINES)
        return "".join(lines).strip()


@contextmanager
def _locked(files: _Files) -> Iterator[int]:
    """Own the directory. The descriptor is inherited by the server, so the lock outlives us with it."""
    descriptor = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(os.pread(descriptor, 64, 0).decode(errors="replace"))
            raise BusError(
                f"the bus store {files.directory} is in use by process {holder}",
                remedy=f"Stop it (kill {holder}) or use another run directory.",
            ) from error
        note_holders(descriptor, os.getpid())
        yield descriptor
    finally:
        os.close(descriptor)


def note_holders(descriptor: int, *pids: int) -> None:
    """Write who owns the store: its starter, then its server."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, " ".join(map(str, pids)).encode(), 0)


def _holder(text: str) -> str:
    """Return the first process of a lock file that is alive (a server can outlive its starter)."""
    pids = [pid for pid in text.split() if pid.isdigit()]
    alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return next(iter(alive or pids), "unknown")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _busy(port: str) -> BusError:
    return BusError(
        f"{port} of the bus is in use by another program",
        remedy="Choose another bus.port, or 0 for any free one.",
    )


def _choose_port(files: _Files, requested: int) -> int:
    """Return the port to ask for: the requested one, the one of the last start, or -1 (any)."""
    if requested:
        if not _is_free(requested):
            raise _busy(f"port {requested}")
        return requested
    try:
        saved = int(files.port.read_text())
    except (OSError, ValueError):
        return -1
    if _is_free(saved):
        return saved
    log.warning("port %d of the last start is taken; the bus gets another one", saved)
    return -1


def _choose_token(files: _Files, token: str) -> str:
    """Return the given token, the one of the last start, or a new one; the file keeps it."""
    if not token and files.token.exists():
        token = files.token.read_text().strip()
    token = token or secrets.token_urlsafe(24)
    write_private(files.token, token)
    return token


@dataclass(frozen=True)
class _Settings:
    run: str
    token: str = field(repr=False)
    sync: str
    payload_mb: int
    store_gb: float


def ready_seconds(store: Path) -> float:
    """Return how long a server may take to be ready: after a crash it reads its whole store again."""
    sizes = 0
    for root, _, names in os.walk(store):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes += os.stat(os.path.join(root, name)).st_size
    return _READY_SECONDS + sizes / _READ_BYTES_PER_SECOND


def _configuration(files: _Files, settings: _Settings, port: int) -> str:
    quote = json.dumps
    common = jetstream_settings(
        max_payload_mb=settings.payload_mb,
        store=str(files.store),
        store_gb=settings.store_gb,
        sync=settings.sync,
    )
    return f"""listen: "127.0.0.1:{port}"
server_name: {quote(f"spade-{settings.run}")}
ports_file_dir: {quote(str(files.directory))}
log_file: {quote(str(files.log))}
logfile_size_limit: 67108864
logfile_max_num: 2
{common}authorization {{
  token: {quote(settings.token)}
}}
"""


class _Server:
    """The server process, which can be started again."""

    def __init__(self, files: _Files, binary: Path, lock: int, settings: _Settings) -> None:
        self._files, self._binary, self._lock = files, binary, lock
        self._settings = settings
        self.process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._log_start = self._log_read = 0

    async def start(self, port: int) -> str:
        """Start and return the URL once the server answers with our token. Raises BusError."""
        write_private(self._files.config, _configuration(self._files, self._settings, port))
        for stale in self._files.ports():
            stale.unlink(missing_ok=True)
        self._log_start = self._log_read = self._files.log.stat().st_size if self._files.log.exists() else 0
        self._spawn()
        patience = ready_seconds(self._files.store)
        try:
            with anyio.fail_after(patience):
                url = await self._await_ports()
                await self._await_answer(url)
        except TimeoutError:
            await self.stop()
            raise BusUnavailable(
                "nats-server to become ready", patience, remedy=self.explain("Its log ends:")
            ) from None
        except BaseException:
            await self.stop()
            raise
        return url

    def _spawn(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise BusError(
                "the bus server must be started from the main thread",
                remedy="It would die with the thread that started it.",
            )
        self._errors = self._files.errors.open("wb")
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(self._binary)]
        self.process = subprocess.Popen(
            [*command, "-c", str(self._files.config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(self._lock,),
            start_new_session=True,
        )
        note_holders(self._lock, os.getpid(), self.process.pid)

    async def _await_ports(self) -> str:
        """Return the URL from the ports file, which the server writes when it listens."""
        assert self.process is not None
        wanted = self._files.directory / f"nats-server_{self.process.pid}.ports"
        while True:
            if self.process.poll() is not None:
                raise self._died_at_start()
            try:
                ports = json.loads(wanted.read_text())
                return str(ports["nats"][0])
            except (OSError, ValueError, KeyError, IndexError):
                await anyio.sleep(_POLL_SECONDS)

    async def _await_answer(self, url: str) -> None:
        token = self._settings.token
        async with open_connection(url, name="spade.server.ready", token=token) as connection:
            await connection.api("INFO")

    def _died_at_start(self) -> BusError:
        text = self._files.tail(self._log_start)
        if _PORT_TAKEN in text:
            return _busy("the port")
        return BusError("nats-server ended as it started", remedy=f"Its log ends:\n{text}")

    def explain(self, what: str) -> str:
        """Return ``what`` and the end of the log."""
        return f"{what}\n{self._files.tail(self._log_start)}"

    def full_disk(self) -> str:
        """Return the line with which the server complained about its disk since the last call, if any."""
        if not self._files.log.exists():
            return ""
        with self._files.log.open("rb") as file:
            rotated = self._files.log.stat().st_size < self._log_read
            file.seek(0 if rotated else self._log_read)
            text = file.read().decode(errors="replace")
            self._log_read = file.tell()
        return next((line for line in text.splitlines() if any(sign in line for sign in _FULL_DISK)), "")

    async def wait(self) -> int:
        """Return the exit code when the process has ended."""
        assert self.process is not None
        return await _ended(self.process)

    async def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL; it is reaped in any case."""
        process, self.process = self.process, None
        if process is not None:
            with anyio.CancelScope(shield=True):
                if process.poll() is None:
                    process.terminate()
                    with anyio.move_on_after(_STOP_SECONDS):
                        await _ended(process)
                if process.poll() is None:
                    log.warning("nats-server %d ignores SIGTERM; killing it", process.pid)
                    process.kill()
                process.wait()
        if self._errors is not None:
            self._errors.close()


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Return a child's exit code when it has ended."""
    if hasattr(os, "pidfd_open"):
        descriptor = os.pidfd_open(process.pid)
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)
        return process.wait()
    return await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)


async def _keep_running(server: _Server, handle: ServerHandle, port: int) -> None:
    """Start the server again on its port whenever it dies. Raises BusError when that is hopeless."""
    crashes: deque[float] = deque(maxlen=_CRASHES)
    young, started = 0, anyio.current_time()
    why = f"nats-server ended with {await server.wait()}"
    while True:
        now = anyio.current_time()
        # Only one that does not live for long is kept waiting: everybody else waits with it.
        young = young + 1 if now - started < _YOUNG_SECONDS else 0
        crashes.append(now)
        recent = sum(now - when < _CRASH_SECONDS for when in crashes)
        log.error("%s; starting it again\n%s", why, server.explain("Its log ends:"))
        if recent >= _CRASHES:
            raise BusError(
                f"{why}; {recent} faults within {_CRASH_SECONDS:g} s",
                remedy=server.explain("Its log ends:"),
            )
        await anyio.sleep(_BACKOFF[min(young, len(_BACKOFF) - 1)])
        await server.stop()
        started = anyio.current_time()
        try:
            handle.url = await server.start(port)
        except BusError as error:
            why = f"nats-server did not start again ({error.what})"
            continue
        assert server.process is not None
        handle.pid = server.process.pid
        handle.restarts += 1
        why = f"nats-server ended with {await server.wait()}"


def force_to_disk(store: Path, known: set[Path]) -> None:
    """Force the descriptions of streams and consumers to disk; ``known`` keeps those that are.

    The server leaves this to the system: a power failure soon after a stream was made would undo it
    together with everything that was acknowledged in it.
    """
    walk = os.walk(store)  # unlike Path.rglob it bears directories that vanish meanwhile
    found = {Path(root, name) for root, _, names in walk for name in names if name.startswith("meta.")}
    fresh = found - known
    parents = {parent for path in fresh for parent in path.parents if parent.is_relative_to(store)}
    for path in sorted(fresh | parents):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    known |= fresh


async def _watch_disk(server: _Server, store: Path) -> None:
    """Raise BusError when the server cannot write: it keeps running but answers no request."""
    known: set[Path] = set()
    while True:
        await anyio.sleep(_HEALTH_SECONDS)
        await anyio.to_thread.run_sync(force_to_disk, store, known)
        complaint = server.full_disk()
        if complaint:
            raise BusError(
                f"the bus store is full: {complaint}",
                remedy="Free disk space and start the run again; nothing acknowledged is lost.",
            )


def _prepare(directory: Path) -> _Files:
    """Make the directory, readable by its owner only."""
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    return _Files(directory)


@asynccontextmanager
async def serve(
    directory: Path | str,
    *,
    run: str,
    token: str = "",
    port: int = 0,
    sync: str = "100ms",
    max_payload_mb: int = 8,
    store_gb: float = 16.0,
    binary: Path | str | None = None,
) -> AsyncIterator[ServerHandle]:
    """Run a private nats-server in ``directory`` on 127.0.0.1 and keep it running.

    ``port`` 0 takes the port of the last start, or any; ``sync`` is how often acknowledged messages are
    forced to disk ("always", also called "paranoid", loses none at a power failure). Must be entered in
    the main thread. Raises BusError: no program, directory in use, port in use, full disk, too many
    crashes (each with a remedy).
    """
    Names(run)
    files = _prepare(Path(directory))
    program = await anyio.to_thread.run_sync(locate, binary)
    with _locked(files) as lock:
        secret = _choose_token(files, token)
        server = _Server(files, program, lock, _Settings(run, secret, sync, max_payload_mb, store_gb))
        try:
            url = await server.start(_choose_port(files, port))
            actual = int(url.rsplit(":", 1)[1])
            write_private(files.port, str(actual))
            assert server.process is not None
            handle = ServerHandle(url, secret, server.process.pid)
            async with flat_task_group() as group:
                group.start_soon(_keep_running, server, handle, actual)
                group.start_soon(_watch_disk, server, files.store)
                try:
                    yield handle
                finally:
                    group.cancel_scope.cancel()
        finally:
            await server.stop()
