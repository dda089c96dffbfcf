"""Claim check: a message whose body is too large travels as a reference to a blob.

**Bodies follow the retention of the stream that refers to them** (``bus.subjects``). Those of a stream that
forgets lie in one that forgets, too, the oldest first, and nothing is written down about them. A reader takes
a message whose body was forgotten for one that was itself: followers skip and count it, ``get`` raises
Forgotten.

Who needs any other blob is written beside it as claims: ``open`` while it is being written, ``named`` for a
public blob, else the stream and sequence of a stored message. **A blob is removed as soon as it is seen that
no claim of it holds**: a message's claim holds while the message is stored, ``open`` holds for
``ORPHAN_SECONDS`` (longer than a publisher waits for a full stream), after which the message that it was for
is searched. It is looked at after an acknowledgement by the client that gave it, after a purge in the stream
that was purged, and by every client once in ``SWEEP_SECONDS``; one that may not look at a stream takes the
claims of its messages for good. Who removes takes a second look at the claims first, and a dead letter claims
the blob before its message is removed.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from time import monotonic
from typing import Generic, Protocol, TypeVar

import anyio
import msgspec

from bus import codec
from bus.blob import NamedBlobs, Opened, claim_tail, fresh_id, get_bytes, put_pieces, read_ref
from bus.blobstore import Store
from bus.codec import BlobRef, Claim
from bus.errors import BusError, Denied, Forgotten, Incomplete, Undecodable
from bus.holding import Holding
from bus.interface import Blobs, Delivery, Record, Verdict
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
    """The bodies that lie in blobs, for one client. Without :meth:`run` blobs are looked at on the spot.

    ``stores`` are one for each stream of pieces.
    """

    def __init__(
        self, stores: Iterable[Store], *, background: bool, orphan_seconds: float = ORPHAN_SECONDS
    ) -> None:
        self.stores = {store.kind: store for store in stores}
        self._noted = [store for store in self.stores.values() if not store.forgets]
        self._background, self._orphan = background, orphan_seconds
        self._named = self.stores["BLOB"]
        self.blobs: Blobs = NamedBlobs(self._named, self.release)
        self._denied: dict[str, Denied] = {}
        self._bounds: dict[str, float] = {}
        self._checks: dict[tuple[Store, str], tuple[float, int]] = {}
        self._wake = anyio.Event()
        self._counts = dict.fromkeys(
            ("put", "put_bytes", "got", "got_bytes", "removed", "unusable", "forgotten"), 0.0
        )

    def statistics(self) -> dict[str, float]:
        """Return counters and how many blobs wait to be looked at."""
        figures = {f"blob_{name}": value for name, value in self._counts.items()}
        return {**figures, "blob_checks_waiting": float(len(self._checks))}

    # Messages that travel as a reference.

    async def store(self, message: Message) -> BlobRef:
        """Put the body of ``message`` into a blob. Raises BusError when it is larger than ``LARGEST``, or
        than half of what a stream that forgets may hold.
        """
        body = codec.encode_body(message)
        if len(body) > LARGEST:
            raise BusError(
                f"a message of {len(body)} bytes on {message.tail} exceeds {LARGEST} bytes",
                remedy="Put the bytes under a name (bus.blobs) and send the name.",
            )
        store = self.stores[STREAMS[message.stream].bodies]
        if store.forgets and 2 * len(body) > await self._bound(store):
            raise BusError(
                f"a message of {len(body)} bytes on {message.tail} is too large for {store.kind}, which may "
                f"hold {self._bounds[store.kind]:.0f} bytes",
                remedy="Raise bus.store_gb.",
            )
        opened = None if store.forgets else Opened(message.stream, message.tail)
        ref = await put_pieces(store, fresh_id(), body, opened)
        self._counts["put"] += 1
        self._counts["put_bytes"] += ref.size
        return ref

    async def confirm(self, ref: BlobRef, stream: str, sequence: int) -> None:
        """Write down that the message ``sequence`` claims a blob, where that is written down."""
        store = self.stores[ref.where]
        if not store.forgets:
            await store.note(claim_tail(store, ref.id, stream.lower(), sequence))
            await store.drop(claim_tail(store, ref.id, "open"))

    async def forget(self, ref: BlobRef) -> None:
        """Remove a blob that no message claims, for the message was stored before."""
        await self._remove(self.stores[ref.where], ref.id)

    async def fetch(self, claim: Claim, stream: str = "") -> Message:
        """Return the message of ``stream`` whose body is claimed.

        Raises Forgotten when the body is gone and the stream is one that forgets, else Undecodable.
        """
        ref = claim.ref
        if ref.size > LARGEST or ref.count > LARGEST >> 10:
            raise Undecodable(f"its body of {ref.size} bytes is too large", kind=claim.envelope.kind)
        try:
            message = codec.decode_body(claim.envelope.kind, await get_bytes(self.stores[ref.where], ref))
        except Undecodable as error:
            if isinstance(error, Incomplete) and stream and STREAMS[stream].full == "forget":
                raise self._forgotten(claim, stream) from error
            self._counts["unusable"] += 1
            raise Undecodable(error.reason, kind=claim.envelope.kind) from error
        self._counts["got"] += 1
        self._counts["got_bytes"] += ref.size
        return message

    def _forgotten(self, claim: Claim, stream: str) -> Forgotten:
        if not self._counts["forgotten"]:
            log.warning(
                "%s of %s is forgotten: its body made room for newer ones. Others are only counted "
                "(blob_forgotten); a larger bus.store_gb keeps more",
                claim.envelope.id,
                stream,
            )
        self._counts["forgotten"] += 1
        return Forgotten(f"{stream} has forgotten {claim.envelope.id}", remedy="Raise bus.store_gb.")

    async def _bound(self, store: Store) -> float:
        """Return what a store may hold; without a bound where we may not ask."""
        if store.kind not in self._bounds:
            try:
                self._bounds[store.kind] = await store.bound()
            except Denied:
                return math.inf
        return self._bounds[store.kind]

    async def open_record(self, record: Record, stream: str) -> Record:
        """Return the record with its message. Raises Forgotten or Undecodable."""
        if not isinstance(record.message, Claim):
            return record
        message = await self.fetch(record.message, stream)
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
                await self.release(self.stores[claim.ref.where], claim.ref.id)

        delivery.settle = settle_and_release
        return True

    async def keep_for_letter(self, letter: DeadLetter, sequence: int) -> None:
        """Let a dead letter claim the blob that its frame refers to."""
        ref = codec.claim_in(letter.frame)
        if ref is not None and not (store := self.stores[ref.where]).forgets:
            await store.note(claim_tail(store, ref.id, letter.stream.lower(), sequence))

    # What nobody needs any more.

    async def release(self, store: Store, blob: str, now: bool = False) -> None:
        """Look whether somebody still needs a blob: soon, or ``now`` and, if it must be, again."""
        if store.forgets:
            return
        if not self._background:
            await self._check(store, blob)
            return
        if now and await self._gone(store, blob):
            return
        self._checks[store, blob] = (monotonic() + _CHECK_SECONDS[0], 0)
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
        first = (await self._named.state(stream)).first if whole else 0
        for store in self._noted:
            for tail in await store.tails(f"{store.head}.claim.*.{stream.lower()}.*"):
                blob, number = tail.split(".")[2], tail.split(".")[4]
                if not whole or int(number) < first:
                    await self._check(store, blob)

    async def sweep(self) -> None:
        """Look at every blob that somebody claims."""
        for store in self._noted:
            claims: dict[str, list[str]] = {}
            for tail in await store.tails(f"{store.head}.claim.>"):
                claims.setdefault(tail.split(".")[2], []).append(tail)
            named = await self._named_now() if store is self._named else set()
            holding = Holding(store, self._denied, named)
            for blob, tails in claims.items():
                await self._weigh(store, blob, tails, holding)
            await self._relieve(store, claims)

    async def _named_now(self) -> set[str]:
        """Return the blobs that have a name."""
        tails = await self._named.tails("blob.name.>")
        async with aclosing(self._named.read(tails)) as source:
            return {read_ref(value).id async for value in source if value is not None}

    async def _relieve(self, store: Store, claims: dict[str, list[str]]) -> None:
        """Let go of the oldest bodies that an older build put here for a stream that forgets, while they keep
        out half of what may lie here.
        """
        old = [
            (int(tails[0].split(".")[4]), blob)
            for blob, tails in claims.items()
            if len(tails) == 1 and tails[0].split(".")[3] == "event"
        ]
        for _, blob in sorted(old):
            if 2 * (await store.state(store.kind)).bytes <= await self._bound(store):
                return
            await self._remove(store, blob)

    async def _check(self, store: Store, blob: str) -> bool:
        return await self._weigh(store, blob, await store.tails(f"{store.head}.claim.{blob}.>"))

    async def _weigh(
        self, store: Store, blob: str, claims: list[str], holding: Holding | None = None
    ) -> bool:
        """Remove a blob without a claim that holds; returns whether it is gone, as it is without any."""
        if not claims:
            return True
        dead = [tail for tail in claims if not await self._holds(store, blob, tail, holding)]
        if len(dead) < len(claims):
            for tail in dead:
                await store.drop(tail)
            return False
        if set(await store.tails(f"{store.head}.claim.{blob}.>")) - set(claims):
            return False
        await self._remove(store, blob)
        return True

    async def _remove(self, store: Store, blob: str) -> None:
        await store.drop(f"{store.head}.data.{blob}.>")
        await store.drop(f"{store.head}.claim.{blob}.>")
        self._counts["removed"] += 1

    async def _holds(self, store: Store, blob: str, tail: str, holding: Holding | None) -> bool:
        """Whether a claim holds; one that this build does not understand, or may not look at, does."""
        owner, _, number = tail.removeprefix(f"{store.head}.claim.{blob}.").partition(".")
        try:
            if owner == "open":
                return await self._open_holds(store, blob, tail)
            if owner == "named" and holding is not None and blob in holding.named:
                return True
            if owner == "named":
                name = await store.value(tail)
                return name is not None and await self._is_named(blob, name.decode(errors="replace"))
            if owner.upper() not in STREAMS or not number.isdecimal():
                return True
            return await (holding or store).holds(owner.upper(), int(number))
        except Denied:
            return True

    async def _open_holds(self, store: Store, blob: str, tail: str) -> bool:
        age, value = await store.age(tail), await store.value(tail)
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
                await store.note(claim_tail(store, blob, "named"), opened.tail.encode())
            return False
        sequence = await store.find(opened.stream, opened.tail, blob)
        if sequence is not None:
            await store.note(claim_tail(store, blob, opened.stream.lower(), sequence))
        return False

    async def _is_named(self, blob: str, name: str) -> bool:
        value = await self._named.value(f"blob.name.{name}")
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
        for store, blob in [one for one, (due, _) in self._checks.items() if due <= now]:
            tries = self._checks.pop((store, blob))[1] + 1
            if not await self._check(store, blob) and tries < len(_CHECK_SECONDS):
                self._checks[store, blob] = (monotonic() + _CHECK_SECONDS[tries], tries)

    async def _gone(self, store: Store, blob: str) -> bool:
        try:
            return await self._check(store, blob)
        except BusError as error:
            log.debug("blob %s is looked at later: %s", blob, error)
            return False


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
