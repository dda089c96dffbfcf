"""Claim check: a message whose body is too large travels as a reference to a blob.

Who needs a blob is written beside it as claims: ``open`` while it is being written, ``named`` for a public
blob, else the stream and sequence of a stored message. **A blob is removed as soon as it is seen that no
claim of it holds**: a message's claim holds while the message is stored, ``open`` holds for
``ORPHAN_SECONDS`` (longer than a publisher waits for a full stream), after which the message that it was for
is searched. It is looked at after an acknowledgement by the client that gave it, after a purge in the stream
that was purged, and by every client once in ``SWEEP_SECONDS``; one that may not look at a stream takes the
claims of its messages for good. Who removes takes a second look at the claims first, and a dead letter claims
the blob before its message is removed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from time import monotonic
from typing import Generic, Protocol, TypeVar

import anyio
import msgspec

from bus import codec
from bus.blob import NamedBlobs, Opened, fresh_id, get_bytes, open_tail, put_pieces, read_ref
from bus.blobstore import Store
from bus.codec import BlobRef, Claim
from bus.errors import BusError, Denied, Undecodable
from bus.face import Blobs, Delivery, Record, Verdict
from bus.messages import DeadLetter, Message
from bus.subjects import STREAMS

log = logging.getLogger("spade.bus")
INLINE = 1 << 20
LARGEST = 256 << 20
ORPHAN_SECONDS = 8 * 3600.0
SWEEP_SECONDS = 60.0
_CHECK_SECONDS = (0.5, 2.0, 10.0)
_MOST_CHECKS = 4096
_opened = msgspec.msgpack.Decoder(Opened)


class Claims:
    """The bodies that lie in blobs, for one client. Without :meth:`run` blobs are looked at on the spot."""

    def __init__(self, store: Store, *, background: bool, orphan_seconds: float = ORPHAN_SECONDS) -> None:
        self._store, self._background, self._orphan = store, background, orphan_seconds
        self.blobs: Blobs = NamedBlobs(store, self.release)
        self._checks: dict[str, tuple[float, int]] = {}
        self._wake = anyio.Event()
        self._counts = dict.fromkeys(("put", "put_bytes", "got", "got_bytes", "removed", "unusable"), 0.0)

    def statistics(self) -> dict[str, float]:
        """Return counters and how many blobs wait to be looked at."""
        figures = {f"blob_{name}": value for name, value in self._counts.items()}
        return {**figures, "blob_checks_waiting": float(len(self._checks))}

    # Messages that travel as a reference.

    async def store(self, message: Message) -> BlobRef:
        """Put the body of ``message`` into a blob. Raises BusError when it is larger than ``LARGEST``."""
        body = codec.encode_body(message)
        if len(body) > LARGEST:
            raise BusError(
                f"a message of {len(body)} bytes on {message.tail} exceeds {LARGEST} bytes",
                remedy="Put the bytes under a name (bus.blobs) and send the name.",
            )
        ref = await put_pieces(self._store, fresh_id(), body, Opened(message.stream, message.tail))
        self._counts["put"] += 1
        self._counts["put_bytes"] += ref.size
        return ref

    async def confirm(self, ref: BlobRef, stream: str, sequence: int) -> None:
        """Write down that the message ``sequence`` claims a blob."""
        await self._store.note(_claim(ref.id, stream, sequence))
        await self._store.drop(open_tail(ref.id))

    async def forget(self, ref: BlobRef) -> None:
        """Remove a blob that no message claims, for the message was stored before."""
        await self._remove(ref.id)

    async def fetch(self, claim: Claim) -> Message:
        """Return the message whose body is claimed. Raises Undecodable when it cannot be used."""
        ref = claim.ref
        if ref.size > LARGEST or ref.count > LARGEST >> 10:
            raise Undecodable(f"its body of {ref.size} bytes is too large", kind=claim.envelope.kind)
        try:
            message = codec.decode_body(claim.envelope.kind, await get_bytes(self._store, ref))
        except Undecodable as error:
            self._counts["unusable"] += 1
            raise Undecodable(error.reason, kind=claim.envelope.kind) from error
        self._counts["got"] += 1
        self._counts["got_bytes"] += ref.size
        return message

    async def open_record(self, record: Record) -> Record:
        """Return the record with its message. Raises Undecodable."""
        if not isinstance(record.message, Claim):
            return record
        message = await self.fetch(record.message)
        return msgspec.structs.replace(record, message=message, blob=record.message.ref.size)

    async def open_delivery(self, delivery: Delivery) -> bool:
        """Give a delivery its message; one without a usable body becomes a dead letter, and False."""
        claim, settle = delivery.message, delivery.settle
        assert isinstance(claim, Claim)
        try:
            delivery.message = await self.fetch(claim)
        except Undecodable as error:
            log.error("work %d cannot be used: %s", delivery.sequence, error)
            try:
                await delivery.term(error.reason)
            except BaseException:
                delivery.settled = False  # it is tried again when the delivery comes again
                raise
            return False
        whole = delivery.message
        delivery.blob = claim.ref.size

        async def settle_and_release(one: Delivery, verdict: Verdict, delay: float, reason: str) -> None:
            one.message = claim  # a dead letter keeps the reference, as it was stored
            try:
                await settle(one, verdict, delay, reason)
            finally:
                one.message = whole
            if verdict != "nak":
                await self.release(claim.ref.id)

        delivery.settle = settle_and_release
        return True

    async def keep_for_letter(self, letter: DeadLetter, sequence: int) -> None:
        """Let a dead letter claim the blob that its frame refers to."""
        ref = codec.claim_in(letter.frame)
        if ref is not None:
            await self._store.note(_claim(ref.id, letter.stream, sequence))

    # What nobody needs any more.

    async def release(self, blob: str) -> None:
        """Look soon whether somebody still needs a blob."""
        if not self._background:
            await self._check(blob)
            return
        self._checks[blob] = (monotonic() + _CHECK_SECONDS[0], 0)
        if len(self._checks) > _MOST_CHECKS:
            del self._checks[next(iter(self._checks))]
        self._wake.set()

    async def after_purge(self, stream: str, *, whole: bool) -> None:
        """Remove the blobs of purged messages. ``whole``: all below what is left of the stream is gone.

        The purge has happened: what fails here is logged, and a later look makes up for it.
        """
        try:
            await self._after_purge(stream, whole)
        except BusError as error:
            log.warning("blobs of what was purged from %s stay for now: %s", stream, error)

    async def _after_purge(self, stream: str, whole: bool) -> None:
        first = (await self._store.ends(stream))[0] if whole else 0
        for tail in await self._store.tails(f"blob.claim.*.{stream.lower()}.*"):
            blob, number = tail.split(".")[2], tail.split(".")[4]
            if whole and int(number) >= first:
                continue
            await self._check(blob)

    async def sweep(self) -> None:
        """Look at every blob there is."""
        claims: dict[str, list[str]] = {}
        for tail in await self._store.tails("blob.claim.>"):
            claims.setdefault(tail.split(".")[2], []).append(tail)
        for blob, tails in claims.items():
            await self._weigh(blob, tails)

    async def _check(self, blob: str) -> bool:
        return await self._weigh(blob, await self._store.tails(f"blob.claim.{blob}.>"))

    async def _weigh(self, blob: str, claims: list[str]) -> bool:
        """Remove a blob without a claim that holds; returns whether it is gone."""
        dead = [tail for tail in claims if not await self._holds(blob, tail)]
        if len(dead) < len(claims):
            for tail in dead:
                await self._store.drop(tail)
            return False
        if set(await self._store.tails(f"blob.claim.{blob}.>")) - set(claims):
            return False
        await self._remove(blob)
        return True

    async def _remove(self, blob: str) -> None:
        await self._store.drop(f"blob.data.{blob}.>")
        await self._store.drop(f"blob.claim.{blob}.>")
        self._counts["removed"] += 1

    async def _holds(self, blob: str, tail: str) -> bool:
        """Whether a claim holds; one that this build does not understand, or may not look at, does."""
        owner, _, number = tail.removeprefix(f"blob.claim.{blob}.").partition(".")
        try:
            if owner == "open":
                return await self._open_holds(blob, tail)
            if owner == "named":
                name = await self._store.value(tail)
                return name is not None and await self._is_named(blob, name.decode(errors="replace"))
            if owner.upper() not in STREAMS or not number.isdecimal():
                return True
            return await self._store.holds(owner.upper(), int(number))
        except Denied:
            return True

    async def _open_holds(self, blob: str, tail: str) -> bool:
        age, value = await self._store.age(tail), await self._store.value(tail)
        if age is None or value is None:
            return False
        if age < self._orphan:
            return True
        try:
            opened = _opened.decode(value)
        except msgspec.DecodeError:
            return True
        if not opened.stream:
            if await self._is_named(blob, opened.tail):
                await self._store.note(f"blob.claim.{blob}.named.0", opened.tail.encode())
            return False
        sequence = await self._store.find(opened.stream, opened.tail, blob)
        if sequence is not None:
            await self._store.note(_claim(blob, opened.stream, sequence))
        return False

    async def _is_named(self, blob: str, name: str) -> bool:
        value = await self._store.value(f"blob.name.{name}")
        return value is not None and read_ref(value).id == blob

    async def run(self) -> None:
        """Look at what was released, and at everything once in a while, for ever."""
        swept = monotonic()
        while True:
            self._wake = anyio.Event()
            now = monotonic()
            next_due = min((due for due, _ in self._checks.values()), default=now + SWEEP_SECONDS)
            with anyio.move_on_after(max(0.0, min(next_due, swept + SWEEP_SECONDS) - now)):
                await self._wake.wait()
            try:
                await self._check_due()
                if monotonic() - swept >= SWEEP_SECONDS:
                    await self.sweep()
            except BusError as error:
                log.warning("blobs that nobody needs stay for now: %s", error)
            if monotonic() - swept >= SWEEP_SECONDS:
                swept = monotonic()

    async def _check_due(self) -> None:
        now = monotonic()
        for blob in [blob for blob, (due, _) in self._checks.items() if due <= now]:
            tries = self._checks.pop(blob)[1] + 1
            if not await self._check(blob) and tries < len(_CHECK_SECONDS):
                self._checks[blob] = (monotonic() + _CHECK_SECONDS[tries], tries)


def _claim(blob: str, stream: str, sequence: int) -> str:
    return f"blob.claim.{blob}.{stream.lower()}.{sequence}"


class Openable(Protocol):
    """What can hold a Claim in the place of its message."""

    @property
    def message(self) -> Message: ...


T = TypeVar("T", bound=Openable)


def _nothing() -> None:
    return None


class Opening(Generic[T]):
    """Iterates over a source and opens what is claimed. ``open_one`` returns None for what is skipped.

    What was taken when a caller is cancelled comes again; ``put_back`` gives it to all readers at once.
    ``take`` returns the source's next item if it need not be waited for, else None.
    """

    def __init__(
        self,
        source: AsyncIterator[T],
        open_one: Callable[[T], Awaitable[T | None]],
        put_back: Callable[[T], None] | None = None,
        take: Callable[[], T | None] = _nothing,
    ) -> None:
        self._source, self._open, self._take = source, open_one, take
        self._back: deque[T] = deque()
        self._put_back = put_back or self._back.appendleft

    def __aiter__(self) -> Opening[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            item = self._back.popleft() if self._back else self._take()
            if item is None:
                item = await anext(self._source)
            if not isinstance(item.message, Claim):
                return item
            try:
                opened = await self._open(item)
            except BaseException:
                self._put_back(item)
                raise
            if opened is not None:
                return opened
