"""Dead letters: what could not be used, why, and giving it a second chance.

A retried letter is published onto its subject under an id of its own (``retry:STREAM:SEQUENCE``), for the
server may still remember the first one and would swallow it. The id depends on the message alone, so a
retry that was cut short, or several letters of one message, store it once. The letter goes when the server
has acknowledged the message, not before.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from bus import BusError, NatsBus, NotFound, codec, reads
from bus.errors import Undecodable
from bus.messages import DeadLetter
from bus.reads import Stored
from bus.subjects import STREAMS, stream_of
from engine.busview import reading, show
from engine.busview.reading import Filter

_CUT = re.compile(r"\(cut from \d+ bytes\)$")
_NO_MESSAGE = (10037, 10043, 10057)
_VARYING = re.compile(r"[0-9a-f]{8,}|\d+")


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """One dead letter. ``number`` is its sequence in the DLQ; ``damaged`` says why the letter itself
    cannot be read, ``kind`` and ``id`` are those of the message in it (empty when nobody can tell).
    """

    number: int
    at: float
    source: str = ""
    sequence: int = 0
    subject: str = ""
    reason: str = ""
    attempts: int = 0
    kind: str = ""
    id: str = ""
    frame: bytes = b""
    damaged: str | None = None

    def light(self) -> Letter:
        """Return the letter without its message, unless that refers to a body elsewhere."""
        return self if codec.claim_in(self.frame) is not None else msgspec.structs.replace(self, frame=b"")

    def record(self) -> dict[str, Any]:
        """Return the letter as JSON types, its message by size only."""
        return {
            **{name: getattr(self, name) for name in self.__struct_fields__ if name != "frame"},
            "size": len(self.frame),
        }


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Letters with one reason, whatever numbers stand in it; ``reason`` and ``number`` are the last one's."""

    source: str
    kind: str
    reason: str
    count: int
    first_at: float
    last_at: float
    number: int


def letter_of(stored: Stored) -> Letter:
    """Read a letter; never fails."""
    try:
        _, message = codec.decode(stored.frame)
    except Undecodable as error:
        return Letter(number=stored.sequence, at=stored.at, frame=stored.frame, damaged=error.reason)
    if not isinstance(message, DeadLetter):
        what = f"a {codec.kind_of(message)} among the dead letters"
        return Letter(number=stored.sequence, at=stored.at, frame=stored.frame, damaged=what)
    envelope, _, _ = show.take_apart(message.frame)
    return Letter(
        number=stored.sequence,
        at=stored.at,
        source=message.source,
        sequence=message.sequence,
        subject=message.subject,
        reason=message.reason,
        attempts=message.attempts,
        kind=envelope.kind if envelope else "",
        id=envelope.id if envelope else "",
        frame=message.frame,
    )


class Grouping:
    """Counts letters by source, kind and reason."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], Group] = {}
        self.count = 0

    def add(self, letter: Letter) -> None:
        """Count a letter; give them in their order."""
        reason = f"damaged letter: {letter.damaged}" if letter.damaged is not None else letter.reason
        key = (letter.source, letter.kind, _VARYING.sub("#", reason))
        old = self._found.get(key)
        self.count += 1
        self._found[key] = Group(
            source=letter.source,
            kind=letter.kind,
            reason=reason,
            count=(old.count if old else 0) + 1,
            first_at=old.first_at if old else letter.at,
            last_at=letter.at,
            number=letter.number,
        )

    def groups(self) -> list[Group]:
        """Return the groups, the largest first."""
        return sorted(self._found.values(), key=lambda group: (-group.count, group.number))


def obstacle(letter: Letter) -> str | None:
    """Return why a letter cannot be published again, None when it can."""
    if letter.damaged is not None:
        return f"it cannot be read ({letter.damaged})"
    if _CUT.search(letter.reason):
        return "it was too long to be kept whole"
    try:
        home = stream_of(letter.subject)
    except BusError as error:
        return error.what
    return None if home == letter.source else f"{letter.subject} belongs to {home}, not to {letter.source}"


async def every(bus: NatsBus) -> AsyncIterator[Letter]:
    """Yield all letters there are now, oldest first."""
    info = await bus.stream_info("DLQ")
    async for stored, _ in reading.between(bus, Filter("DLQ"), info.first, info.last):
        yield letter_of(stored)


async def find(bus: NatsBus, number: int) -> Letter:
    """Return one letter. Raises NotFound."""
    try:
        return letter_of(await reading.one(bus, "DLQ", number))
    except NotFound:
        raise NotFound(
            f"there is no dead letter {number}", remedy="`spade bus dlq list` shows those there are."
        ) from None


async def retry(bus: NatsBus, letter: Letter) -> bool:
    """Publish the message of ``letter`` again and remove the letter; return whether it was stored now.

    False means that an earlier retry had stored it. Raises BusError when it cannot be published; the
    letter stays then.
    """
    why = obstacle(letter) or await _replaced(bus, letter)
    if why is not None:
        raise BusError(f"letter {letter.number} cannot be tried again: {why}", remedy="The letter stays.")
    sequence, fresh = await _earlier(bus, letter), False
    if sequence is None:
        answer = await bus.publisher.send(
            bus.names.stream(letter.source),
            bus.names.subject(letter.subject),
            letter.frame,
            {},
            message_id=_key(letter),
        )
        sequence, fresh = answer.seq, not answer.duplicate
    body = codec.claim_in(letter.frame)
    if body is not None:
        await bus.claims.confirm(body, letter.source, sequence)
    await drop(bus, letter)
    return fresh


def _key(letter: Letter) -> str:
    return f"retry:{letter.source}:{letter.sequence}"


async def _earlier(bus: NatsBus, letter: Letter) -> int | None:
    """Return the sequence under which an earlier retry stored the message, None when it is not there.

    The server forgets ids after minutes. Where a subject belongs to one message, what lies there tells;
    on the others only the server's memory does.
    """
    stream = STREAMS[letter.source]
    if not stream.work and stream.per_subject < 1:
        return None
    answer = await reads.direct(
        bus.connection,
        bus.names.stream(letter.source),
        {"last_by_subj": bus.names.subject(letter.subject)},
        f"last message on {letter.subject}",
    )
    found = reads.stored_of(bus.names, answer) if answer is not None else None
    return found.sequence if found is not None and found.id == _key(letter) else None


async def _replaced(bus: NatsBus, letter: Letter) -> str | None:
    """Where a stream keeps one message a subject, a letter must not push out a newer one."""
    if STREAMS[letter.source].per_subject < 1:
        return None
    wanted = Filter(letter.source, (letter.subject,))
    info = await bus.stream_info(letter.source)
    async for stored, _ in reading.between(bus, wanted, letter.sequence + 1, info.last):
        if stored.id != _key(letter):
            return f"message {stored.sequence} took its place"
    return None


async def drop(bus: NatsBus, letter: Letter) -> bool:
    """Remove a letter for good, with a body that nobody else needs; False when it is gone already."""
    try:
        await bus.connection.api(
            f"STREAM.MSG.DELETE.{bus.names.stream('DLQ')}", {"seq": letter.number, "no_erase": True}
        )
    except BusError as error:
        if isinstance(error, NotFound) or getattr(error, "code", 0) in _NO_MESSAGE:
            return False
        raise
    body = codec.claim_in(letter.frame)
    if body is not None:
        await bus.claims.release(bus.claims.stores[body.where], body.id)
    return True
