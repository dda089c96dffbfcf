"""Between two event loops in two threads: calls with cancellation, contexts, and bounded channels.

*Home* is the loop of the caller, *far* the loop that does the work. Plain attributes cross the border where
one side alone writes them; whoever waits sets its flag first and looks again before it sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import TaskGroup, TaskStatus
from anyio.lowlevel import checkpoint

from bus.errors import BusError, BusUnavailable
from bus.mailbox import Mailbox
from bus.scopes import flat_task_group

log = logging.getLogger("spade.bus")
T = TypeVar("T")
_CANCEL_SECONDS = 5.0
_CLOSE_SECONDS = 15.0
_TURN = 64


def tell(
    loop: asyncio.AbstractEventLoop,
    function: Callable[..., object],
    *arguments: object,
    context: contextvars.Context | None = None,
) -> None:
    """Call ``function`` soon in another thread's loop; one that has ended needs to hear nothing."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments, context=context)


class _Job(Generic[T]):
    """One call: runs far, is awaited at home."""

    def __init__(self, home: asyncio.AbstractEventLoop, work: Callable[[], Awaitable[T]]) -> None:
        self._home, self._work = home, work
        self._scope: anyio.CancelScope | None = None
        self._cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self.over = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self.returned = False

    async def run(self) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                if self._cancelled:
                    self._scope.cancel()
                self.result = await self._work()
                self.returned = True
        except Exception as error:
            self.error = error
        finally:
            tell(self._home, self.finish)

    def finish(self) -> None:
        """Home: note that the work has ended."""
        self.over = True
        self.wake()

    def wake(self) -> None:
        """Home: let :meth:`wait` look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """Far: end the work."""
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    async def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Home: return when the work has ended, or ``until`` holds."""
        while not (self.over or until()):
            self._waiter = self._home.create_future()
            await self._waiter

    def outcome(self) -> T:
        """Home: return the result or raise the error of work that has ended."""
        if self.error is not None:
            raise self.error
        if not self.returned:
            raise BusUnavailable("answer: the thread of the bus ended", 0)
        return self.result  # type: ignore[return-value]


class Bridge:
    """From home to a far loop. ``group`` runs the calls there; :meth:`run_posted` must be running in it."""

    def __init__(self, home: asyncio.AbstractEventLoop, group: TaskGroup) -> None:
        self.home, self.far = home, asyncio.get_running_loop()
        self._group = group
        self._context = contextvars.copy_context()  # a task group wants to know which kind of loop runs
        self._posted: Mailbox[Callable[[], Awaitable[object]]] = Mailbox()
        self._outbox: deque[Callable[[], Awaitable[object]]] = deque()
        self._told = False
        self.closed = False
        self._counts = {"calls": 0.0, "in_flight": 0.0, "posted": 0.0, "failed_posts": 0.0}

    def statistics(self) -> dict[str, float]:
        """Return how many calls are on the other side and how many notes wait to be carried out."""
        waiting = float(len(self._outbox) + len(self._posted))
        return {f"thread_{name}": value for name, value in {**self._counts, "waiting": waiting}.items()}

    def _start(self, work: Callable[[], Awaitable[T]]) -> _Job[T]:
        if self.closed:
            raise BusUnavailable("thread of the bus: it has ended", 0)
        job = _Job(self.home, work)
        self._counts["calls"] += 1
        tell(self.far, self._spawn, job, context=self._context)
        return job

    def _spawn(self, job: _Job[Any]) -> None:
        try:
            self._group.start_soon(job.run)
        except RuntimeError:  # the group has ended
            tell(self.home, job.finish)

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run ``work`` over there and return its result. A cancelled call is cancelled there, and ends."""
        job = self._start(work)
        self._counts["in_flight"] += 1
        try:
            await job.wait()
        except BaseException:
            await self._stop(job)
            raise
        finally:
            self._counts["in_flight"] -= 1
        return job.outcome()

    async def _stop(self, job: _Job[Any]) -> None:
        tell(self.far, job.cancel)
        with anyio.move_on_after(0 if self.closed else _CANCEL_SECONDS, shield=True):
            await job.wait()
        if not (job.over or self.closed):
            log.error("a cancelled call of the bus does not end")

    def post(self, work: Callable[[], Awaitable[object]]) -> None:
        """Have ``work`` done over there, after what was posted before, without waiting for it."""
        self._counts["posted"] += 1
        self._outbox.append(work)
        if not self._told:
            self._told = True
            tell(self.far, self._fetch_posted)

    def _fetch_posted(self) -> None:
        self._told = False
        while self._outbox:
            self._posted.put(self._outbox.popleft())

    async def run_posted(self) -> None:
        """Far: carry out what is posted, for ever."""
        async for work in self._posted:
            try:
                await work()
            except BusError as error:
                self._counts["failed_posts"] += 1
                log.warning("on the thread of the bus: %s", error)

    @asynccontextmanager
    async def hold(
        self,
        context: Callable[[], AbstractAsyncContextManager[T]],
        serve: Callable[[T], Coroutine[Any, Any, None]] | None = None,
    ) -> AsyncIterator[T]:
        """Keep a context open over there, with ``serve`` running inside it, while this one is open.

        An error that ends the context there cancels the body here and is raised, as it would be there.
        """
        held = _Held(self, context, serve)
        async with flat_task_group() as group:
            value = await group.start(held.watch)
            try:
                yield value
            finally:
                group.cancel_scope.cancel()


class _Held(Generic[T]):
    """One context that is open far."""

    def __init__(
        self,
        bridge: Bridge,
        context: Callable[[], AbstractAsyncContextManager[T]],
        serve: Callable[[T], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self._bridge, self._context, self._serve = bridge, context, serve
        self._opened: list[T] = []
        self._closing: anyio.Event | None = None

    async def _stay(self, opened: Callable[[T], None]) -> None:
        self._closing = anyio.Event()
        async with self._context() as value:
            tell(self._bridge.home, opened, value)
            async with flat_task_group() as group:
                if self._serve is not None:
                    group.start_soon(self._serve, value)
                await self._closing.wait()
                group.cancel_scope.cancel()

    async def _close(self) -> None:
        assert self._closing is not None
        self._closing.set()

    async def watch(self, *, task_status: TaskStatus[T]) -> None:
        def opened(value: T) -> None:
            self._opened.append(value)
            job.wake()

        bridge = self._bridge
        job = bridge._start(lambda: self._stay(opened))
        try:
            await job.wait(lambda: bool(self._opened))
            if self._opened:
                task_status.started(self._opened[0])
            await job.wait()
        except BaseException:
            if self._opened:
                bridge.post(self._close)
                with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
                    await job.wait()
            if not job.over:
                await bridge._stop(job)
            if job.error is not None:
                raise job.error from None
            raise
        job.outcome()


class Channel(Generic[T]):
    """Items from a far iterator, in order, for readers at home. Not more than ``capacity`` (by ``weight``)
    lie between the two, or one item that is heavier.
    """

    def __init__(self, bridge: Bridge, capacity: int, weight: Callable[[T], int] = lambda item: 1) -> None:
        self._bridge, self._capacity, self._weight = bridge, capacity, weight
        self._items: deque[T] = deque()
        self._end: BaseException | None = None
        self._sent = self._taken = 0
        self._far_waits = self._home_waits = False
        self._room: anyio.Event | None = None
        self._wake: anyio.Event | None = None
        self._turns = 0

    def __len__(self) -> int:
        return len(self._items)

    # Far.

    async def serve(self, source: AsyncIterator[T], change: Callable[[T], T] = lambda item: item) -> None:
        """Carry over what ``source`` gives, each item through ``change``; its end ends the readers."""
        try:
            async for item in source:
                if self._sent - self._taken >= self._capacity:
                    await self._wait_for_room()
                self._sent += self._weight(item)
                self._items.append(change(item))
                self._call_home()
        except Exception as error:
            self._end = error
        else:
            self._end = StopAsyncIteration()
        self._call_home()

    async def _wait_for_room(self) -> None:
        while True:
            self._room = anyio.Event()
            self._far_waits = True
            if self._sent - self._taken <= self._capacity // 2:
                self._far_waits = False
                return
            await self._room.wait()

    def _call_home(self) -> None:
        if self._home_waits:
            self._home_waits = False
            tell(self._bridge.home, self._ring)

    # Home.

    def _ring(self) -> None:
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    def __aiter__(self) -> Channel[T]:
        return self

    async def __anext__(self) -> T:
        self._turns += 1
        if self._turns % _TURN == 0:
            await checkpoint()
        while not self._items:
            if self._wake is None:
                self._wake = anyio.Event()
            wake, self._home_waits = self._wake, True
            if self._items:
                break
            if self._end is not None:
                raise self._end
            await wake.wait()
        item = self._items.popleft()
        self._taken += self._weight(item)
        if self._far_waits and self._sent - self._taken <= self._capacity // 2:
            self._far_waits = False
            tell(self._bridge.far, self._make_room)
        return item

    def _make_room(self) -> None:
        if self._room is not None:
            self._room.set()


class FarThread(Generic[T]):
    """A thread with an event loop in which one context is open. Start it from home."""

    def __init__(self, context: Callable[[], AbstractAsyncContextManager[T]], name: str) -> None:
        self._context = context
        self._home = asyncio.get_running_loop()
        self._uvloop = type(self._home).__module__.startswith("uvloop")
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._far: asyncio.AbstractEventLoop | None = None
        self._scope: anyio.CancelScope | None = None
        self._ready, self._ended = anyio.Event(), anyio.Event()
        self._error: BaseException | None = None
        self.value: T
        self.bridge: Bridge

    def _main(self) -> None:
        try:
            anyio.run(self._live, backend_options={"use_uvloop": self._uvloop})
        except BaseException as error:
            self._error = error
        finally:
            tell(self._home, self._ended.set)

    async def _live(self) -> None:
        self._scope = anyio.CancelScope()  # before the loop is known: whoever stops us cancels it there
        self._far = asyncio.get_running_loop()
        with self._scope:
            async with self._context() as self.value, flat_task_group() as group:
                self.bridge = Bridge(self._home, group)
                group.start_soon(self.bridge.run_posted)
                tell(self._home, self._ready.set)
                await anyio.sleep_forever()

    async def start(self) -> None:
        """Return when the context is open. Raises what kept it from opening."""
        self._thread.start()
        async with anyio.create_task_group() as group:
            for event in (self._ready, self._ended):
                group.start_soon(self._either, event, group.cancel_scope)
        if self._error is not None:
            raise self._error

    @staticmethod
    async def _either(event: anyio.Event, scope: anyio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    async def watch(self) -> None:
        """Raise when the thread ends by itself."""
        await self._ended.wait()
        self.bridge.closed = True
        raise self._error or BusUnavailable("thread of the bus: it has ended", 0)

    async def stop(self) -> None:
        """Close the context and end the thread, within fifteen seconds."""
        if hasattr(self, "bridge"):
            self.bridge.closed = True
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            while self._far is None and not self._ended.is_set():  # noqa: ASYNC110 (the thread just starts)
                await anyio.sleep(0.001)
            if self._far is not None and self._scope is not None:
                tell(self._far, self._scope.cancel)
            await self._ended.wait()
            self._thread.join(_CANCEL_SECONDS)
            return
        log.error("the thread of the bus does not end")
