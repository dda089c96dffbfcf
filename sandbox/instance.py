"""One live environment: its channel, its deadlines, its end.

The channel and the timers are callbacks of the event loop; the public coroutines wait on futures only, so
a cancelled call leaves nothing behind but a killed process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any, Literal

import anyio

from sandbox import frames, host, kernel
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
from sandbox.frames import ResetResult, StepResult

if TYPE_CHECKING:
    from sandbox.pool import SandboxPool
    from sandbox.zygote_client import Keeper

UNCONFINED = 99
_READ = 1 << 16
_EXIT_GRACE = 0.1
_TICK = 0.25
_SOONEST = 0.25
_LEAST_DELAY = 0.002


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
    left = budget - (cpu or 0.0)
    wall = min(_TICK, hard - elapsed) if elapsed >= soft else soft - elapsed
    return max(_LEAST_DELAY, min(left, wall))


def cause_of_death(status: int, cpu: float, life: int) -> SandboxError:
    """Read a raw wait ``status``; ``cpu`` seconds were used of ``life``."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGSYS:
        return EnvViolation("a forbidden system call")
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu >= life):
        return EnvTimeout("life", life)
    return EnvCrashed(signal=-code) if code < 0 else EnvCrashed(code=code)


class Instance:
    """A seeded object of a program in its own process. Made by :meth:`SandboxPool.spawn`.

    ``first`` is the first observation, ``info`` its info, ``class_name``, ``max_turns``, ``calls``,
    ``tools`` (is it a tool environment?) and ``declared`` (JSON, see contract.declaration) describe the
    program, ``output`` is what it printed during the last call, ``cpu`` the CPU seconds of its whole life,
    known at its end.
    """

    def __init__(self, pool: SandboxPool, keeper: Keeper, number: int, program: str) -> None:
        self.number, self.program = number, program
        self.first, self.output = "", ""
        self.info: dict[str, frames.Scalar] = {}
        self.class_name = ""
        self.max_turns: int | None = None
        self.calls: tuple[str, ...] = ()
        self.tools, self.declared = False, ""
        self.used = time.monotonic()
        self.cpu = 0.0
        self.pid = 0
        self.error: SandboxError | None = None
        self.gone = asyncio.Event()
        self._pool, self.keeper, self._settings = pool, keeper, pool.settings
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._unsent = b""
        self._pidfd = -1
        self._confined = self._calling = False
        self._born = asyncio.Event()
        self._request = 0
        self._turn: asyncio.Semaphore | None = None
        self._answer: asyncio.Future[frames.Reply] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._started = self._spent = self._budget = 0.0
        self._socket, self._theirs = socket.socketpair()
        self._socket.setblocking(False)

    @property
    def busy(self) -> bool:
        """Whether a call is under way, or waiting for its turn."""
        return self._calling

    async def step(self, action: str) -> StepResult:
        """Send the inner text of an action. Raises EnvError and the terminal errors of the package."""
        text = plain(action[: self._settings.max_action_bytes])
        reply = await self._call({"op": "step", "action": text})
        return StepResult(reply.o, reply.r, reply.te, reply.tr, reply.f)

    async def reset(self, seed: int) -> ResetResult:
        """Start another episode in the same object."""
        reply = await self._call({"op": "reset", "seed": seed})
        return ResetResult(reply.o, reply.f)

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call one of the other methods of the contract; returns its value as JSON knows it."""
        reply = await self._call({"op": "call", "name": name, "args": args, "kwargs": kwargs})
        try:
            return frames.read_value(reply.o)
        except frames.Malformed as error:
            self._end(EnvProtocolError(str(error)))
            raise EnvProtocolError(str(error)) from None

    async def state(self, seed: int) -> str:
        """Return a digest of what the object holds besides ``seed``, the one of the last reset."""
        return (await self._call({"op": "state", "seed": seed})).o

    async def close(self) -> None:
        """Kill the process and wait until it is reaped. Idempotent; safe under cancellation."""
        self._end(InstanceClosed("the instance was closed"))
        with anyio.move_on_after(self._settings.spawn_seconds, shield=True):
            await self.gone.wait()

    async def __aenter__(self) -> Instance:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def load(self, frame: bytes) -> frames.Reply:
        """Have the process forked and wait for the answer to request 1, ``frame``. For the pool."""
        self._loop.add_reader(self._socket, self._readable)
        # the request lies in the socket before the child exists: one round trip in all
        answer = self._ask(frame, self._settings.cpu_load_seconds)
        self._suspect_zygote("fork a child")
        self.keeper.request(self, self._theirs)
        reply = await self._wait(answer)
        await self._birth()
        return reply

    def describe(self, reply: frames.Reply) -> None:
        """Take over what the answer to ``load`` says of the program. For the pool."""
        if reply.m is None:
            error = EnvProtocolError("the answer to load does not describe the program")
            self._end(error)
            raise error
        self.first, self.info = reply.o, reply.f
        self.class_name, self.max_turns, self.calls = reply.m.cls, reply.m.turns, reply.m.calls
        self.tools, self.declared = reply.m.tools, reply.m.meta

    async def _birth(self) -> None:
        """Wait for the zygote's word, which may come after the child's; without it nobody could be killed."""
        try:
            await self._born.wait()
        except asyncio.CancelledError:
            self._end(InstanceClosed("a spawn was cancelled"))
            raise
        if self.error is not None:
            raise self.error

    async def _call(self, message: dict[str, Any]) -> frames.Reply:
        if self._calling:
            raise InfraFailure("the instance is answering another call")
        frame = frames.pack({"i": self._request + 1, **message})
        self._calling = True
        try:
            await self._pool.turns.acquire()
            self.hold(self._pool.turns)
            if self.error is not None:
                raise self.error
            answer = self._ask(frame, self._settings.cpu_call_seconds)
            self._start_clock()
            return await self._wait(answer)
        finally:
            self.let_go()
            self._calling = False

    def hold(self, turns: asyncio.Semaphore) -> None:
        """Keep a turn that was acquired; ``turns`` bound how many programs run at a time. For the pool."""
        self._turn = turns

    def let_go(self) -> None:
        """Give the turn back, if it is still held. For the pool."""
        if self._turn is not None:
            self._turn.release()
            self._turn = None

    def _ask(self, frame: bytes, budget: float) -> asyncio.Future[frames.Reply]:
        self._request += 1
        self._budget = budget
        self._answer = self._loop.create_future()
        self._write(frame)
        return self._answer

    async def _wait(self, answer: asyncio.Future[frames.Reply]) -> frames.Reply:
        try:
            reply = await answer
        except asyncio.CancelledError:
            # nobody knows the program's state now
            self._end(InstanceClosed("a call was cancelled"))
            raise
        finally:
            self._stop_clock()
            self._answer = None
            self.used = time.monotonic()
        self._pool.calls += 1
        self.output = reply.out or ""
        if reply.err is not None:
            kind, message, frames_, phase = reply.err
            if kind == "MemoryError":
                self._end(EnvMemory("the program reached its memory limit"))
                raise EnvMemory("the program reached its memory limit")
            raise EnvError(kind, message, phase=phase, traceback=frames_)
        return reply

    def _write(self, data: bytes) -> None:
        if not self._unsent:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                # the end of the process is read from its exit, not from here
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
            self._hung_up()
            return
        self._buffer += data
        try:
            self._digest()
        except frames.Malformed as error:
            self._end(EnvProtocolError(str(error)))

    def _digest(self) -> None:
        """Take the hello and the one expected reply out of the buffer; anything more is a violation."""
        bounds = self._pool.bounds
        if self._answer is not None and self._answer.cancelled():
            # the reply overtook the cancelled call, which has not run yet: no fault of the program
            self._end(InstanceClosed("a call was cancelled"))
            return
        while self._buffer:
            waiting = self._answer is not None and not self._answer.done()
            if self._confined and not waiting:
                raise frames.Malformed("bytes that nobody asked for")
            body = frames.cut(self._buffer, bounds.reply)
            if body is None:
                return
            if not self._confined:
                frames.read_reply(body, 0, bounds)
                self._confined = True
                continue
            reply = frames.read_reply(body, self._request, bounds)
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(reply)

    def _hung_up(self) -> None:
        """End of file: let the exit notice say why, for a moment.

        A signal of ours now would hide the one that the process may be dying of.
        """
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self.error is None and not self.gone.is_set():
            self._stop_clock()
            # a timer of its own: the end of the call that is under way must not stop it
            self._grace = self._loop.call_later(_EXIT_GRACE, self._hung_up_for_long)

    def _hung_up_for_long(self) -> None:
        """Kill what closed its channel and lives on; of a dead process only the notice is late."""
        self._grace = None
        if self._pidfd >= 0 and not host.ended(self._pidfd):
            self._end(EnvCrashed())
        elif self._watch is None:
            self._suspect_zygote("reap a child")

    def _start_clock(self) -> None:
        if self._timer is not None or self._answer is None or self._answer.done():
            return
        self._started = self._loop.time()
        self._spent = self._cpu() or 0.0
        delay = min(self._budget, self._settings.wall_call_seconds, _SOONEST)
        self._timer = self._loop.call_later(delay, self._look)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if host.ended(self._pidfd):
            # its number may be another's already; how it ended is read from its exit notice
            return
        settings, spent = self._settings, self._cpu()
        elapsed = self._loop.time() - self._started
        asleep = host.sleeping(self.pid)
        if asleep:
            # it uses no CPU: others need not wait until its wall clock runs out
            self.let_go()
        verdict = overdue(
            elapsed,
            None if spent is None else spent - self._spent,
            asleep,
            budget=self._budget,
            soft=settings.wall_call_seconds,
            hard=settings.wall_hard_seconds,
        )
        if isinstance(verdict, float):
            self._timer = self._loop.call_later(min(verdict, 2 * _TICK), self._look)
            return
        limit = self._budget if verdict == "cpu" else elapsed
        self._end(EnvTimeout(verdict, round(limit, 3)))

    def _cpu(self) -> float | None:
        if not self.pid:
            return None
        try:
            return kernel.cpu_seconds(self.pid)
        except OSError:
            return None

    def spawned(self, pidfd: int) -> None:
        """The zygote forked us."""
        self._calm()
        self._pidfd = pidfd
        self.pid = host.pid_of(pidfd)
        self._born.set()
        if self.error is None:
            self._start_clock()
        else:
            self._signal()
            self._suspect_zygote("reap a child")

    def refused(self, reason: str) -> None:
        """The zygote could not fork us."""
        self._theirs.close()
        self._end(SpawnRefused(reason))
        self._depart()

    def exited(self, status: int, cpu: float) -> None:
        """The zygote reaped us."""
        self.cpu = cpu
        if self.error is None and not self._confined and os.waitstatus_to_exitcode(status) == UNCONFINED:
            self._end(SpawnRefused("a child could not take the walls that its zygote reported"))
        if self.error is None:
            cause = cause_of_death(status, cpu, self._settings.cpu_life_seconds)
            if isinstance(cause, EnvCrashed) and cause.signal == signal.SIGKILL:
                cause = self._pool.killed_from_outside() or cause
            self._end(cause)
        self._depart()

    def orphaned(self, reason: str) -> None:
        """The zygote is gone, and we with it."""
        self._end(SandboxUnavailable(f"the zygote of this instance is gone: {reason}"))
        self._depart()

    def _suspect_zygote(self, what: str) -> None:
        """Give the zygote a bounded time to ``what``, or hold it for hung."""
        self._calm()
        seconds = self._settings.spawn_seconds
        self._watch = self._loop.call_later(
            seconds, self.keeper.give_up, f"the zygote did not {what} within {seconds:g} s"
        )

    def _calm(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def expire(self, error: SandboxError) -> None:
        """End the instance from outside a call. For the pool."""
        self._end(error)

    def _end(self, error: SandboxError) -> None:
        """Kill the process and hand ``error`` to who waits; the first error stays."""
        if self.error is not None:
            return
        self.error = error
        self._stop_clock()
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._signal()
        self._pool.ended(self, error)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        if not self.gone.is_set() and self._pidfd >= 0:
            self._suspect_zygote("reap a child")

    def _signal(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _depart(self) -> None:
        """The process does not exist any more: give back what we hold."""
        if self.gone.is_set():
            return
        self._calm()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self.pid = 0
        self._born.set()
        self.gone.set()
        self._pool.departed(self)


def plain(text: str) -> str:
    """``text`` without lone surrogates, which JSON in UTF-8 cannot carry."""
    return text.encode("utf-8", "replace").decode("utf-8")
