"""Dead letters: messages that no role could use, the reasons, and publishing them again.

A replayed letter is published on its subject under the id ``retry:STREAM:SEQUENCE``, because the broker may
still remember the first id. The id depends on the message alone, so a replay that was interrupted stores it
once. The letter is removed after the broker has acknowledged the message.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from bus import BusError, NatsBus, NotFound, codec
from bus.errors import Undecodable
from bus.messages import DeadLetter
from bus.reads import Stored
from bus.subjects import STREAMS, stream_of
from engine.busview.stored import DecodedMessage, StreamSelection, between, decode

_CUT = re.compile(r"\(cut from \d+ bytes\)$")
_VARYING = re.compile(r"[0-9a-f]{8,}|\d+")
_ALL = StreamSelection("DLQ")


class StoredLetter(msgspec.Struct, frozen=True, kw_only=True):
    """One dead letter. ``number`` is its sequence in the DLQ; ``damaged`` says why the letter itself cannot
    be read; ``kind`` and ``id`` are those of the message in it, empty when unknown.
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

    def record(self) -> dict[str, Any]:
        """Return the letter as JSON types, with the size of its message."""
        fields = msgspec.structs.asdict(self)
        size = len(fields.pop("frame"))
        return {**fields, "size": size}

    def message(self) -> DecodedMessage:
        """Return the message in the letter."""
        inner = Stored(self.sequence, self.subject, self.frame, self.id, self.at)
        return decode(self.source or "DLQ", inner)

    def obstacle(self) -> str | None:
        """Return why the letter cannot be published again, None when it can."""
        if self.damaged is not None:
            return f"it cannot be read ({self.damaged})"
        if _CUT.search(self.reason):
            return "its message was too long to be kept whole"
        try:
            home = stream_of(self.subject)
        except BusError as error:
            return error.what
        return None if home == self.source else f"{self.subject} belongs to {home}, not to {self.source}"


def read(stored: Stored) -> StoredLetter:
    """Read a letter; never fails."""
    number, why = stored.sequence, ""
    try:
        _, fields = codec.decode(stored.frame)
        if not isinstance(fields, DeadLetter):
            why = f"a {codec.kind_of(fields)} among the dead letters"
    except Undecodable as error:
        why = error.reason
    if why:
        return StoredLetter(number=number, at=stored.at, frame=stored.frame, damaged=why)
    assert isinstance(fields, DeadLetter)
    inner = decode(fields.source, Stored(fields.sequence, fields.subject, fields.frame, "", stored.at))
    return StoredLetter(
        number=number,
        at=stored.at,
        source=fields.source,
        sequence=fields.sequence,
        subject=fields.subject,
        reason=fields.reason,
        attempts=fields.attempts,
        kind=inner.kind,
        id=inner.id,
        frame=fields.frame,
    )


async def stored_letters(bus: NatsBus, numbers: Sequence[int] = ()) -> AsyncIterator[StoredLetter]:
    """Yield the letters with these numbers, all without any. Raises NotFound for a missing one."""
    info = await bus.stream_info("DLQ")
    for first, last in [(one, one) for one in dict.fromkeys(numbers)] or [(info.first, info.last)]:
        found = False
        async for stored, _ in between(bus, _ALL, first, last):
            found = True
            yield read(stored)
        if numbers and not found:
            raise NotFound(
                f"there is no dead letter {first}", remedy="`spade bus dlq list` shows the letters."
            )


def grouped(letters: Sequence[StoredLetter]) -> list[tuple[int, StoredLetter]]:
    """Return (count, last letter) for each source, kind and reason, the largest group first. Numbers in a
    reason do not separate groups.
    """
    groups: dict[tuple[str, str, str], list[StoredLetter]] = {}
    for one in letters:
        reason = _VARYING.sub("#", one.damaged or one.reason)
        groups.setdefault((one.source, one.kind, reason), []).append(one)
    return sorted(((len(group), group[-1]) for group in groups.values()), key=lambda pair: -pair[0])


async def replay(bus: NatsBus, letter: StoredLetter) -> None:
    """Publish the message of a letter again, then remove the letter.

    Raises BusError when the message cannot be published; the letter stays then.
    """
    why = letter.obstacle() or await _superseded(bus, letter)
    if why is not None:
        raise BusError(f"letter {letter.number} cannot be replayed: {why}", remedy="The letter stays.")
    await bus.publisher.send(
        bus.names.stream(letter.source),
        bus.names.subject(letter.subject),
        letter.frame,
        {},
        message_id=_id(letter),
    )
    await bus.connection.api(
        f"STREAM.MSG.DELETE.{bus.names.stream('DLQ')}", {"seq": letter.number, "no_erase": True}
    )


def _id(letter: StoredLetter) -> str:
    return f"retry:{letter.source}:{letter.sequence}"


async def _superseded(bus: NatsBus, letter: StoredLetter) -> str | None:
    """Where a stream keeps one message per subject, a letter must not replace a newer one."""
    if STREAMS[letter.source].per_subject < 1:
        return None
    last = (await bus.stream_info(letter.source)).last
    wanted = StreamSelection(letter.source, (letter.subject,))
    async for stored, _ in between(bus, wanted, letter.sequence + 1, last):
        if stored.id != _id(letter):
            return f"message {stored.sequence} has replaced it"
    return None
