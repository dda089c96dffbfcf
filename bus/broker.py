"""The broker of a MemoryBus: streams, state, rights and entries in one process."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from bus.errors import BusError
from bus.mailbox import Mailbox
from bus.messages import Message
from bus.presence import Entry
from bus.subjects import STREAMS


class Signal:
    """Wakes everybody who waits for a change."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = anyio.Event()

    async def wait(self, seconds: float = math.inf) -> None:
        with anyio.move_on_after(seconds):
            await self._event.wait()


@dataclass(slots=True)
class Stored:
    tail: str
    frame: bytes
    ready_at: float = 0.0
    attempts: int = 0
    holder: object | None = None


@dataclass(slots=True)
class Log:
    """One stream."""

    kind: str
    most: int
    last: int = 0
    messages: dict[int, Stored] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)

    def first(self) -> int:
        return next(iter(self.messages), self.last + 1)

    def append(self, tail: str, frame: bytes, key: str) -> int:
        if STREAMS[self.kind].per_subject == 1:
            for sequence in [number for number, stored in self.messages.items() if stored.tail == tail]:
                del self.messages[sequence]
        self.last += 1
        self.messages[self.last] = Stored(tail, frame)
        self.ids[key] = self.last
        return self.last


@dataclass(slots=True)
class Right:
    holder: object
    who: str
    revision: int
    expires: float


@dataclass(slots=True)
class Said:
    frame: bytes
    at: float
    expires: float


class Broker:
    """What the peers of one MemoryBus share."""

    def __init__(self, task_limit: int) -> None:
        self.logs = {
            kind: Log(kind, task_limit if stream.work else 1 << 62) for kind, stream in STREAMS.items()
        }
        self.values: dict[str, tuple[int, bytes]] = {}
        self.rights: dict[str, Right] = {}
        self.revision = 0
        self.changed = Signal()
        self.listeners: dict[Mailbox[Message], str] = {}
        self.present: dict[str, Said] = {}

    async def put(self, key: str, frame: bytes, *, ttl: float) -> None:
        await anyio.lowlevel.checkpoint()
        now = anyio.current_time()
        self.present[key] = Said(frame, now, now + ttl)

    async def entries(self) -> list[Entry]:
        await anyio.lowlevel.checkpoint()
        now, wall = anyio.current_time(), time.time()
        self.present = {key: said for key, said in self.present.items() if said.expires > now}
        return [Entry(one.frame, wall - (now - one.at), now - one.at) for one in self.present.values()]

    def log(self, stream: str) -> Log:
        if stream not in self.logs:
            raise BusError(f"unknown stream {stream!r}", remedy=f"One of {', '.join(self.logs)}.")
        return self.logs[stream]

    def next_revision(self) -> int:
        self.revision += 1
        return self.revision
