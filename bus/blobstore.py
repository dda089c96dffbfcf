"""Where pieces of blobs and the notes about them lie: in the streams of pieces, or in memory."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence, Set
from contextlib import aclosing
from datetime import datetime
from typing import Any, Protocol

import anyio
import anyio.lowlevel

from bus import reads
from bus.codec import Claim, decode
from bus.connection import Connection
from bus.entry import Entry
from bus.errors import NotFound, Undecodable
from bus.fetch import certain, subjects_of, values
from bus.interface import Record, StreamInfo
from bus.publish import Publisher
from bus.subjects import STREAMS, Names, matches

_AHEAD = 8
_UNCOLLECTED = 64


class Store(ABC):
    """Values by tail in the stream ``kind``, the last write wins; and questions about who claims them."""

    def __init__(self, kind: str) -> None:
        self.kind, self.head = kind, STREAMS[kind].head
        self.forgets = STREAMS[kind].full == "forget"

    @abstractmethod
    async def write(self, pieces: AsyncIterator[tuple[str, bytes]]) -> None:
        """Store all (tail, value), through a window; returns when all are stored."""

    @abstractmethod
    def read(self, tails: Sequence[str]) -> AsyncGenerator[bytes | None, None]:
        """Yield the value of each tail in order, None where there is none."""

    @abstractmethod
    async def age(self, tail: str) -> float | None:
        """Return for how many seconds the value lies there, by the broker's clock."""

    @abstractmethod
    async def tails(self, pattern: str) -> list[str]:
        """Return all tails in ``pattern`` that have a value."""

    @abstractmethod
    async def drop(self, pattern: str) -> None:
        """Remove all values in ``pattern``."""

    @abstractmethod
    async def bound(self) -> float:
        """Return how many bytes may lie here."""

    @abstractmethod
    async def state(self, stream: str) -> StreamInfo:
        """Return the state of a stream of messages. Raises Denied."""

    @abstractmethod
    async def holes(self, stream: str) -> Set[int]:
        """Return the sequences between the first and the last message of a stream that are not stored."""

    @abstractmethod
    async def holds(self, stream: str, sequence: int) -> bool:
        """Whether the message is (still) stored. Raises Denied."""

    @abstractmethod
    async def find(self, stream: str, tail: str, blob: str) -> int | None:
        """Return the sequence of the message on ``tail`` whose body is ``blob``; reads all of them."""

    async def value(self, tail: str) -> bytes | None:
        """Return one value."""
        async with aclosing(self.read([tail])) as source:
            return await anext(source)

    async def note(self, tail: str, value: bytes = b"") -> None:
        """Store one value."""

        async def one() -> AsyncIterator[tuple[str, bytes]]:
            yield tail, value

        await self.write(one())


class NatsStore(Store):
    """Values in one stream of a run."""

    def __init__(self, connection: Connection, publisher: Publisher, names: Names, kind: str) -> None:
        super().__init__(kind)
        self._connection, self._publisher, self._names = connection, publisher, names
        self._stream = names.stream(kind)
        self._serial = 0

    async def write(self, pieces: AsyncIterator[tuple[str, bytes]]) -> None:
        pending: deque[Entry] = deque()
        try:
            async for tail, value in pieces:
                pending.append(await self._submit(tail, value))
                while pending and (pending[0].ended or len(pending) > _UNCOLLECTED):
                    await self._publisher.collect([pending.popleft()])
            await self._publisher.collect(list(pending))
        except BaseException:
            self._publisher.abandon(list(pending))
            raise

    async def _submit(self, tail: str, value: bytes) -> Entry:
        self._serial += 1
        key = f"{self._connection.inbox}.{self._serial}"
        return await self._publisher.submit(
            self._stream, self._names.subject(tail), value, {}, message_id=key
        )

    async def read(self, tails: Sequence[str]) -> AsyncGenerator[bytes | None, None]:
        subjects = [self._names.subject(tail) for tail in tails]
        source = values(self._connection, self._stream, subjects, window=_AHEAD)
        async with aclosing(source):
            number = 0
            async for message in source:
                if message is None and self._connection.clustered:
                    request: dict[str, object] = {"last_by_subj": subjects[number]}
                    message = await reads.newest(self._connection, self._stream, request, tails[number])
                number += 1
                yield None if message is None else message.data

    async def age(self, tail: str) -> float | None:
        now = (await self._connection.api(f"STREAM.INFO.{self._stream}"))["ts"]
        request: dict[str, object] = {"last_by_subj": self._names.subject(tail)}
        found = await reads.direct(self._connection, self._stream, request, f"age of {tail}")
        if found is None:
            return None
        stamp = (found.headers or {})["Nats-Time-Stamp"]
        return (datetime.fromisoformat(now) - datetime.fromisoformat(stamp)).total_seconds()

    async def tails(self, pattern: str) -> list[str]:
        subject = self._names.subject(pattern)
        try:
            found = await subjects_of(self._connection, self._stream, subject)
        except NotFound:  # a run that an older build provisioned
            return []
        return [self._names.tail(one) for one in found]

    async def drop(self, pattern: str) -> None:
        body = {"filter": self._names.subject(pattern)}
        await self._connection.api(f"STREAM.PURGE.{self._stream}", body)

    async def bound(self) -> float:
        return float((await self._connection.api(f"STREAM.INFO.{self._stream}"))["config"]["max_bytes"])

    async def state(self, stream: str) -> StreamInfo:
        return await reads.stream_info(self._connection, self._names, stream)

    async def holes(self, stream: str) -> Set[int]:
        asked = {"deleted_details": True}
        answer = await self._connection.api(f"STREAM.INFO.{self._names.stream(stream)}", asked)
        return set(answer["state"].get("deleted") or ())

    async def holds(self, stream: str, sequence: int) -> bool:
        name, what = self._names.stream(stream), f"message {sequence} of {stream}"
        if await reads.direct(self._connection, name, {"seq": sequence}, what) is not None:
            return True
        return await certain(self._connection, self._names, stream, {"seq": sequence})

    async def find(self, stream: str, tail: str, blob: str) -> int | None:
        last = (await self.state(stream)).last
        found = reads.replay(self._connection, self._names, stream, start=1, tails=[tail], last=last)
        async for record in found:
            if isinstance(record, Record) and isinstance(record.message, Claim):  # noqa: SIM102
                if record.message.ref.id == blob:
                    return record.sequence
        return None


class _Logs(Protocol):
    """What a MemoryStore needs of its broker."""

    def log(self, stream: str) -> Any: ...


class MemoryStore(Store):
    """Values in a log of a MemoryBus."""

    def __init__(self, broker: _Logs, kind: str) -> None:
        super().__init__(kind)
        self._broker = broker
        self._log = broker.log(kind)

    async def write(self, pieces: AsyncIterator[tuple[str, bytes]]) -> None:
        async for tail, value in pieces:
            self._log.append(tail, bytes(value), tail)
            self._last(tail).ready_at = anyio.current_time()
            await anyio.lowlevel.checkpoint()

    def _last(self, tail: str) -> Any:
        return next((one for one in self._log.messages.values() if one.tail == tail), None)

    async def read(self, tails: Sequence[str]) -> AsyncGenerator[bytes | None, None]:
        for tail in tails:
            await anyio.lowlevel.checkpoint()
            found = self._last(tail)
            yield None if found is None else found.frame

    async def age(self, tail: str) -> float | None:
        found = self._last(tail)
        return None if found is None else anyio.current_time() - found.ready_at

    async def tails(self, pattern: str) -> list[str]:
        return [one.tail for one in self._log.messages.values() if matches(pattern, one.tail)]

    async def drop(self, pattern: str) -> None:
        for sequence in [s for s, one in self._log.messages.items() if matches(pattern, one.tail)]:
            del self._log.messages[sequence]

    async def bound(self) -> float:
        return math.inf

    async def state(self, stream: str) -> StreamInfo:
        log = self._broker.log(stream)
        size = sum(len(stored.frame) for stored in log.messages.values())
        return StreamInfo(log.first(), log.last, len(log.messages), size)

    async def holes(self, stream: str) -> Set[int]:
        log = self._broker.log(stream)
        missing: Set[int] = set(range(log.first(), log.last + 1)) - log.messages.keys()
        return missing

    async def holds(self, stream: str, sequence: int) -> bool:
        return sequence in self._broker.log(stream).messages

    async def find(self, stream: str, tail: str, blob: str) -> int | None:
        for sequence, one in self._broker.log(stream).messages.items():
            if not matches(tail, one.tail):
                continue
            try:
                message = decode(one.frame)[1]
            except Undecodable:
                continue
            if isinstance(message, Claim) and message.ref.id == blob:
                return int(sequence)
        return None
