"""One live environment: a program in a process of its own, with its channel, its deadlines and its end.

The channel and the timers are callbacks of the event loop. The public coroutines wait on futures only, so
a cancelled call leaves nothing behind but a killed process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any, Literal, Protocol

import anyio

from sandbox import frames, host, kernel
from sandbox.confine import UNCONFINED
from sandbox.errors import (
    EnvCrashed,
    EnvError,
    EnvMemory,
    EnvProtocolError,
    EnvTimeout,
    EnvViolation,
    InfraFailure,
    InstanceClosed,
    SandboxError,
    SandboxUnavailable,
    SpawnRefused,
)
from sandbox.frames import StepResult

if TYPE_CHECKING:
    from sandbox.zygote_client import ZygoteClient

_READ = 1 << 16
_LOOK, _LEAST_DELAY = 0.25, 0.002  # seconds between two looks at a call


class Owner(Protocol):
    """The pool of an instance, as far as the instance calls it."""

    def ended(self, instance: Instance, error: SandboxError) -> None:
        """Record that ``error`` ended the instance."""

    def departed(self, instance: Instance) -> None:
        """Take back the place of an instance whose process is reaped."""

    def killed_from_outside(self) -> SandboxError | None:
        """Judge a SIGKILL that the instance did not send; None when the program may have sent it."""


def overdue(
    elapsed: float, cpu: float | None, asleep: bool, *, budget: float, soft: float, hard: float
) -> Literal["cpu", "wall"] | float:
    """Judge a call that has run for ``elapsed`` seconds and used ``cpu`` of its ``budget``.

    Returns the clock that ran out, or the seconds until the next look. A program that is starved of CPU
    is not blamed for the wall clock before ``hard``. ``cpu`` None means that it cannot be read.
    """
    if cpu is not None and cpu >= budget:
        return "cpu"
    if elapsed >= hard or (elapsed >= soft and (asleep or cpu is None)):
        return "wall"
    wall = hard - elapsed if elapsed >= soft else soft - elapsed
    return max(_LEAST_DELAY, min(budget - (cpu or 0.0), wall, _LOOK))


def cause_of_death(status: int, cpu: float, life: int) -> SandboxError:
    """Read a raw wait ``status``; ``cpu`` seconds were used of ``life``."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGSYS:
        return EnvViolation("the program made a forbidden system call")
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= life):
        return EnvTimeout("life", life)
    return EnvCrashed(signal=-code) if code < 0 else EnvCrashed(code=code)


class Instance:
    """A seeded object of a program in its own process. Made by :meth:`SandboxPool.spawn`.

    ``first`` is the first observation. ``class_name``, ``max_turns``, ``calls`` (the
    methods that may be called), ``tools`` (true for a tool environment) and ``declared`` (JSON, see
    contract.declaration) describe the program. ``output`` is the text printed during the last call, ``cpu``
    the CPU seconds of the whole life, known at its end.
    """

    def __init__(self, owner: Owner, zygote: ZygoteClient, number: int, program: str) -> None:
        self.zygote, self.number, self.program = zygote, number, program
        self.first, self.output = "", ""
        self.class_name = ""
        self.max_turns: int | None = None
        self.calls: tuple[str, ...] = ()
        self.tools, self.declared = False, ""
        self.used = time.monotonic()
        self.cpu = 0.0
        self.pid = 0
        self.error: SandboxError | None = None
        self.gone = asyncio.Event()
        self._owner, self._settings = owner, zygote.settings
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._unsent = b""
        self._pidfd = -1
        self._confined = self._hung_up = False
        self._born = asyncio.Event()
        self._request = 0
        self._answer: asyncio.Future[frames.RunnerReply] | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._started = self._spent = self._budget = 0.0
        self._socket, self._theirs = socket.socketpair()
        self._socket.setblocking(False)

    @property
    def busy(self) -> bool:
        """True while a call is under way."""
        return self._answer is not None

    @property
    def worn(self) -> bool:
        """True once half of the CPU life is used; play further episodes in a fresh instance."""
        return (self._cpu() or self.cpu) > self._settings.cpu_life_seconds / 2

    async def step(self, action: str) -> StepResult:
        """Send the inner text of an action. Raises EnvError and the terminal errors of the package."""
        text = plain(action[: self._settings.max_action_bytes])
        reply = await self._call({"op": "step", "action": text})
        return StepResult(reply.o, reply.r, reply.te, reply.tr, reply.p)

    async def reset(self, seed: int) -> str:
        """Start another episode in the same object and return its first observation."""
        return (await self._call({"op": "reset", "seed": seed})).o

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of the other methods of the contract and return its JSON value."""
        reply = await self._call({"op": "call", "name": name, "args": args, "kwargs": kwargs})
        try:
            return frames.read_value(reply.o)
        except frames.Malformed as error:
            self.end(EnvProtocolError(str(error)))
            raise EnvProtocolError(str(error)) from None

    async def state(self, seed: int) -> str:
        """Return a digest of the object's values other than ``seed``, the seed of the last reset."""
        return (await self._call({"op": "state", "seed": seed})).o

    async def close(self) -> None:
        """Kill the process and wait until it is reaped. Idempotent; safe under cancellation."""
        self.end(InstanceClosed("the instance was closed"))
        with anyio.move_on_after(self._settings.spawn_seconds, shield=True):
            await self.gone.wait()

    async def __aenter__(self) -> Instance:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def fork(self, frame: bytes) -> None:
        """Have the process forked; ``frame`` is its request 1, see :meth:`answer`. For the pool.

        The zygote's notice, without which the process could not be killed, may come after the first answer.
        """
        self._loop.add_reader(self._socket, self._readable)
        # the request lies in the socket before the child exists: one round trip in all
        self._ask(frame, self._settings.cpu_load_seconds)
        self._suspect_zygote("fork a child")
        self.zygote.request(self, self._theirs)
        try:
            await self._born.wait()
        except asyncio.CancelledError:
            self.end(InstanceClosed("a spawn was cancelled"))
            raise

    def describe(self, reply: frames.RunnerReply) -> None:
        """Set the attributes that describe the program from the answer to ``load``. For the pool."""
        if reply.m is None:
            error = EnvProtocolError("the answer to load does not describe the program")
            self.end(error)
            raise error
        self.first = reply.o
        self.class_name, self.max_turns, self.calls = reply.m.cls, reply.m.turns, reply.m.calls
        self.tools, self.declared = reply.m.tools, reply.m.meta

    async def _call(self, message: dict[str, Any]) -> frames.RunnerReply:
        if self._answer is not None:
            raise InfraFailure("the instance is answering another call")
        if self.error is not None:
            raise self.error
        self._ask(frames.pack({"i": self._request + 1, **message}), self._settings.cpu_call_seconds)
        self._start_clock()
        return await self.answer()

    def _ask(self, frame: bytes, budget: float) -> None:
        self._request += 1
        self._budget = budget
        self._answer = self._loop.create_future()
        self._write(frame)

    async def answer(self) -> frames.RunnerReply:
        """Wait for the answer to the request under way. Raises EnvError and the terminal errors."""
        assert self._answer is not None
        try:
            reply = await self._answer
        except asyncio.CancelledError:
            # the program's state is unknown now
            self.end(InstanceClosed("a call was cancelled"))
            raise
        finally:
            self._stop_clock()
            self._answer = None
            self.used = time.monotonic()
        self.output = reply.out
        if reply.err is not None:
            kind, message, frames_, phase = reply.err
            if kind == "MemoryError":
                error = EnvMemory(f"the program reached its limit of {self._settings.memory_mb} MB")
                self.end(error)
                raise error
            raise EnvError(kind, message, phase=phase, traceback=frames_)
        return reply

    def _write(self, data: bytes) -> None:
        if not self._unsent:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                # the cause is in the zygote's exit notice
                return
        if data:
            self._unsent += data
            self._loop.add_writer(self._socket, self._writable)

    def _writable(self) -> None:
        data, self._unsent = self._unsent, b""
        self._loop.remove_writer(self._socket)
        self._write(data)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._stop_listening()
            self._hung_up = True
            self._leave()
            return
        self._buffer += data
        try:
            self._digest()
        except frames.Malformed as error:
            self.end(EnvProtocolError(str(error)))

    def _digest(self) -> None:
        """Take the hello and the one expected reply out of the buffer; anything more is a violation."""
        if self._answer is not None and self._answer.cancelled():
            # the reply overtook the cancelled call, which has not run yet: no fault of the program
            self.end(InstanceClosed("a call was cancelled"))
            return
        while self._buffer:
            waiting = self._answer is not None and not self._answer.done()
            if self._confined and not waiting:
                raise frames.Malformed("bytes without a request")
            body = frames.cut(self._buffer, self._settings.max_reply_bytes)
            if body is None:
                return
            if not self._confined:
                frames.read_reply(body, 0, self._settings)
                self._confined = True
                continue
            reply = frames.read_reply(body, self._request, self._settings)
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(reply)

    def _start_clock(self) -> None:
        if self._clock is not None or self._answer is None or self._answer.done():
            return
        self._started = self._loop.time()
        self._spent = self._cpu() or 0.0
        self._clock = self._loop.call_later(min(self._budget, _LOOK), self._look)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _look(self) -> None:
        """Compare the running call with its limits."""
        self._clock = None
        settings, spent = self._settings, self._cpu()
        elapsed = self._loop.time() - self._started
        asleep = host.sleeping(self.pid)
        if host.exiting(self._pidfd, self.pid):
            # its number may be another's already: what was read says nothing
            self._leave()
            return
        if asleep and not self._hung_up:
            # It may have answered already, or wait for us to read: a busy loop sees clocks before sockets.
            held = len(self._buffer)
            self._readable()
            asleep = len(self._buffer) == held
        if self._hung_up or self._answer is None or self._answer.done() or self.error is not None:
            return
        verdict = overdue(
            elapsed,
            None if spent is None else spent - self._spent,
            asleep,
            budget=self._budget,
            soft=settings.wall_call_seconds,
            hard=settings.wall_hard_seconds,
        )
        if isinstance(verdict, float):
            self._clock = self._loop.call_later(verdict, self._look)
            return
        limit = self._budget if verdict == "cpu" else elapsed
        self.end(EnvTimeout(verdict, round(limit, 3)))

    def _cpu(self) -> float | None:
        if not self.pid:
            return None
        try:
            return kernel.cpu_seconds(self.pid)
        except OSError:
            return None

    def spawned(self, pidfd: int) -> None:
        """Take over the handle of the forked process. For the zygote's client."""
        self._calm()
        self._pidfd = pidfd
        self.pid = host.pid_of(pidfd)
        self._born.set()
        if self.error is not None:
            self._kill()
        if self._hung_up or self.error is not None:
            self._leave()
        else:
            self._start_clock()

    def refused(self, reason: str) -> None:
        """End the instance, which the zygote could not fork. For the zygote's client."""
        self._theirs.close()
        self.end(SpawnRefused(reason))
        self._depart()

    def exited(self, status: int, cpu: float) -> None:
        """Read the cause of death; the zygote has reaped the process. For the zygote's client."""
        self.cpu = cpu
        if self.error is None:
            cause = cause_of_death(status, cpu, self._settings.cpu_life_seconds)
            if isinstance(cause, EnvCrashed):
                if not self._confined and cause.code == UNCONFINED:
                    cause = SpawnRefused("a child could not take the walls that its zygote reported")
                elif cause.signal == signal.SIGKILL:
                    cause = self._owner.killed_from_outside() or cause
            self.end(cause)
        self._depart()

    def orphaned(self, reason: str) -> None:
        """End the instance together with its zygote. For the zygote's client."""
        self.end(SandboxUnavailable(f"the zygote of this instance is gone: {reason}"))
        self._depart()

    def end(self, error: SandboxError) -> None:
        """Kill the process and raise ``error`` in the waiting call; the first error stays."""
        if self.error is not None:
            return
        self.error = error
        self._stop_listening()
        self._socket.close()
        self._kill()
        self._owner.ended(self, error)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            # a spawn that is cancelled before the process is born never looks
            self._answer.exception()
        self._leave()

    def _leave(self) -> None:
        """Wait, in bounded time, for the zygote's notice of the exit, which says the cause.

        A process that hung up without exiting is killed: it closed its channel and lives on.
        """
        self._stop_clock()
        if self._pidfd < 0 or self.gone.is_set():
            return
        if self.error is None and not host.exiting(self._pidfd, self.pid):
            self.end(EnvCrashed(reason="the process closed its channel"))
        elif self._watch is None:
            self._suspect_zygote("reap a child")

    def _stop_listening(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)

    def _suspect_zygote(self, what: str) -> None:
        """Give the zygote a bounded time to ``what``; then treat it as hung."""
        self._calm()
        seconds = self._settings.spawn_seconds
        self._watch = self._loop.call_later(
            seconds, self.zygote.give_up, f"the zygote did not {what} within {seconds:g} s"
        )

    def _calm(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _kill(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _depart(self) -> None:
        """Give back the descriptors and the place of a process that does not exist any more."""
        if self.gone.is_set():
            return
        self._calm()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self.pid = 0
        self._born.set()
        self.gone.set()
        self._owner.departed(self)


def plain(text: str) -> str:
    """Return ``text`` without lone surrogates, which JSON in UTF-8 cannot carry."""
    return text.encode("utf-8", "replace").decode("utf-8")
