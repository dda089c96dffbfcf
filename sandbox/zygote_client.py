"""The engine's side of one zygote: its process, its control socket, the instances it has forked.

Callbacks of the event loop, and two coroutines that wait for the start and the stop. The instances of a
zygote end with it; the pool starts another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Protocol

import anyio
import msgspec

from sandbox import frames
from sandbox.errors import SandboxUnavailable
from sandbox.settings import SandboxSettings

_MAX_DATAGRAM = 1 << 17
_BURST = 64
_STOP_SECONDS = 5.0
_OUTER_SECONDS = 1.0  # for the outer process to see the end of the inner one
_PASSED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "LD_LIBRARY_PATH")


class ForkedChild(Protocol):
    """Receiver of the zygote's notices about one child, which ``number`` names."""

    number: int

    def spawned(self, pidfd: int) -> None: ...
    def refused(self, reason: str) -> None: ...
    def exited(self, status: int, cpu: float) -> None: ...
    def orphaned(self, reason: str) -> None: ...


class ZygoteClient:
    """Zygote ``index`` of the pool ``pool`` (a number that separates the uids of pools).

    The pool sets ``ready`` when it accepts the zygote's report; programs are forked only then. ``children``
    are the live children by number, ``lost`` is set when the zygote is gone.
    """

    def __init__(
        self, settings: SandboxSettings, index: int, pool: int, slots: int, launcher: tuple[str, ...] = ()
    ) -> None:
        self.settings, self.index = settings, index
        self.ready = False
        self.lost = asyncio.Event()
        self.reason = ""
        self.children: dict[int, ForkedChild] = {}
        self._launcher = launcher
        self._config = {
            "index": index,
            "pool": pool,
            "slots": slots,
            "memory": settings.memory_mb << 20,
            "cpu": settings.cpu_life_seconds,
            "nice": settings.nice,
            "preload": settings.preload,
        }
        self._opened = self._stopping = False
        self._inner = -1
        self._kill_timer: asyncio.TimerHandle | None = None
        self._reaped = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def start(self) -> frames.ZygoteReady:
        """Start the process and wait for its report. Raises SandboxUnavailable."""
        try:
            self._open()
        except OSError as error:
            raise SandboxUnavailable(f"zygote {self.index} cannot be started: {error}") from error
        try:
            with anyio.fail_after(self.settings.start_seconds):
                return await self._report
        except TimeoutError:
            reason = f"zygote {self.index} sent no report within {self.settings.start_seconds:g} s"
            self.give_up(reason)
            raise SandboxUnavailable(reason) from None

    def _open(self) -> None:
        self._report: asyncio.Future[frames.ZygoteReady] = self._loop.create_future()
        with contextlib.ExitStack() as stack:
            self._errors: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            self._control, theirs = map(stack.enter_context, socket.socketpair(type=socket.SOCK_SEQPACKET))
            self._control.setblocking(False)
            self._process = self._launch(theirs)
            stack.callback(self._process.wait)
            stack.callback(self._process.kill)
            theirs.close()
            self._pidfd = os.pidfd_open(self._process.pid)
            stack.pop_all()
        self._loop.add_reader(self._pidfd, self._ended)
        self._loop.add_reader(self._control, self._readable)
        self._opened = True

    def _launch(self, control: socket.socket) -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parent.parent)
        environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        # -I and -E would make Python ignore PYTHONHASHSEED
        environment |= {"PYTHONHASHSEED": "0", "PYTHONPATH": root, "TZ": "UTC", "LC_ALL": "C.UTF-8"}
        environment |= {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}
        python = (sys.executable, "-s", "-P", "-B", "-m", "sandbox.fork_server")
        return subprocess.Popen(
            (*self._launcher, *python, str(control.fileno()), json.dumps(self._config)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(control.fileno(),),
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the outer zygote."""
        return self._process.pid

    def request(self, child: ForkedChild, channel: socket.socket) -> None:
        """Ask for a child that talks on ``channel``, which is closed once it has been sent.

        The pool asks for few at a time, so the requests always fit into the socket's buffer.
        """
        with channel:
            if self.lost.is_set() or self._stopping:
                child.orphaned(self.reason or "it is being stopped")
                return
            self.children[child.number] = child
            try:
                socket.send_fds(self._control, [b'{"id":%d}' % child.number], [channel.fileno()])
            except OSError as error:
                self.give_up(f"control socket: {error}")

    def _readable(self) -> None:
        for _ in range(_BURST):
            try:
                data, descriptors, _, _ = socket.recv_fds(self._control, _MAX_DATAGRAM, 4)
            except BlockingIOError:
                return
            except OSError as error:
                self.give_up(f"control socket: {error}")
                return
            if not data:
                self.give_up("zygote ended", grace=_STOP_SECONDS)
                return
            self._dispatch(data, descriptors)
            if self.lost.is_set():
                return

    def _dispatch(self, data: bytes, descriptors: list[int]) -> None:
        try:
            message = frames.read_zygote_message(data)
        except msgspec.DecodeError as error:
            _close(descriptors)
            self.give_up(f"control message: {error}")
            return
        if isinstance(message, frames.ZygoteReady):
            if not self._report.done():
                self._inner = descriptors.pop() if descriptors else -1
                self._report.set_result(message)
        elif isinstance(message, frames.ZygoteFailed):
            self.give_up(message.reason)
        elif isinstance(message, frames.ChildSpawned):
            self._spawned(message.id, descriptors)
            return
        elif isinstance(message, frames.ChildRefused):
            if child := self.children.pop(message.id, None):
                child.refused(message.reason)
        elif child := self.children.pop(message.id, None):
            child.exited(message.status, message.cpu)
        _close(descriptors)

    def _spawned(self, number: int, descriptors: list[int]) -> None:
        child = self.children.get(number)
        if child is not None and len(descriptors) == 1:
            # a process that inherited it could kill the child
            os.set_inheritable(descriptors[0], False)
            child.spawned(descriptors[0])
            return
        _close(descriptors)
        # the kernel drops descriptors when our own table is full
        self.give_up("no descriptor left for a child's pidfd" if child else "a child without a request")

    def give_up(self, reason: str, *, grace: float = 0.0) -> None:
        """Treat the zygote as gone: kill it after ``grace`` seconds, fail its instances. Idempotent.

        A zygote that ends by itself is given time: its outer process outlives the last of its children.
        """
        if self.lost.is_set():
            return
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        self.reason = reason + (f" ({lines[-1][:300]})" if lines else "")
        self.ready = False
        self._loop.remove_reader(self._control)
        self.lost.set()
        self._control.close()
        if grace:
            self._kill_timer = self._loop.call_later(grace, self._kill)
        else:
            self._kill()
        children, self.children = self.children, {}
        for child in children.values():
            child.orphaned(self.reason)
        if not self._report.done():
            self._report.set_exception(SandboxUnavailable(f"zygote {self.index}: {self.reason}"))

    def _kill(self) -> None:
        """Kill the inner process, and the outer one only when it does not see that and end by itself.

        The inner one is the init of all its children: when the outer one can reap it, none of them is left.
        """
        if self._inner < 0:
            self._kill_outer()
            return
        _signal(self._inner)
        self._kill_timer = self._loop.call_later(_OUTER_SECONDS, self._kill_outer)

    def _kill_outer(self) -> None:
        if self._process.returncode is None:
            _signal(self._pidfd)

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        code = self._process.wait()
        self.give_up(f"zygote ended with code {code}")
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        os.close(self._pidfd)
        self._errors.close()
        if self._inner < 0:
            self._reaped.set()
            return
        # the outer one may have been killed alone
        _signal(self._inner)
        self._loop.add_reader(self._inner, self._inner_ended)

    def _inner_ended(self) -> None:
        self._loop.remove_reader(self._inner)
        os.close(self._inner)
        self._reaped.set()

    async def stop(self) -> None:
        """End the zygote and its children, and wait until it is reaped (shielded, bounded)."""
        if not self._opened:
            return
        with anyio.CancelScope(shield=True):
            if not self.lost.is_set():
                self._stopping = True
                with contextlib.suppress(OSError):
                    self._control.shutdown(socket.SHUT_WR)
            with anyio.move_on_after(_STOP_SECONDS):
                await self._reaped.wait()
                return
            self.give_up("did not stop")
            self._kill()
            with anyio.move_on_after(_STOP_SECONDS):
                await self._reaped.wait()


def _signal(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
