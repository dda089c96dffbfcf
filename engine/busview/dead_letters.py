"""Dead letters: messages that no role could use, the reasons, and publishing them again.

A replayed letter is published on its subject under the id ``retry:STREAM:SEQUENCE``, because the broker may
still remember the first id. The id depends on the message alone, so a replay that was interrupted stores it
once. The letter is removed after the broker has acknowledged the message.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from bus import Bus, BusError, NotFound, codec
from bus.errors import Undecodable
from bus.messages import DeadLetter
from bus.messages.base import kind_of
from bus.publisher import Outgoing
from bus.reads import Stored
from bus.subjects import stream_of
from engine.busview.stored import DecodedMessage, StreamSelection, between, decode

_CUT = re.compile(r"\(cut from \d+ bytes\)$")
_VARYING = re.compile(r"[0-9a-f]{8,}|\d+")
_NONE = DeadLetter(source="", sequence=0, subject="", reason="", attempts=0, frame=b"")


class StoredLetter(NamedTuple):
    """One dead letter.

    ``number`` is its sequence in the DLQ, ``letter`` its content and ``message`` the message in it.
    ``damaged`` says why the letter itself cannot be read, else it is "".
    """

    number: int
    at: float
    letter: DeadLetter
    message: DecodedMessage
    damaged: str

    @property
    def reason(self) -> str:
        """The reason of the letter, or the damage."""
        return self.damaged or self.letter.reason

    def record(self) -> dict[str, Any]:
        """Return the letter as JSON types, with the size of its message."""
        names = ("source", "sequence", "subject", "reason", "attempts")
        fields = {name: getattr(self.letter, name) for name in names}
        known = {"kind": self.message.kind, "id": self.message.id, "size": self.message.size}
        return {"number": self.number, "at": self.at, **fields, **known, "damaged": self.damaged or None}

    def obstacle(self) -> str | None:
        """Return why the letter cannot be published again, None when it can."""
        if self.damaged:
            return f"it cannot be read ({self.damaged})"
        if _CUT.search(self.letter.reason):
            return "its message was too long to be kept whole"
        try:
            home = stream_of(self.letter.subject)
        except BusError as error:
            return error.what
        subject, source = self.letter.subject, self.letter.source
        return None if home == source else f"{subject} belongs to {home}, not to {source}"


def read(stored: Stored) -> StoredLetter:
    """Read a letter; never fails."""
    letter, damaged = _NONE, ""
    try:
        _, content = codec.decode(stored.frame)
        if isinstance(content, DeadLetter):
            letter = content
        else:
            damaged = f"a {kind_of(type(content))} among the dead letters"
    except Undecodable as error:
        damaged = error.reason
    inner = Stored(letter.sequence, letter.subject, letter.frame or stored.frame, "", stored.at)
    return StoredLetter(stored.sequence, stored.at, letter, decode(letter.source or "DLQ", inner), damaged)


async def stored_letters(bus: Bus, numbers: Sequence[int] = ()) -> AsyncIterator[StoredLetter]:
    """Yield the letters with these numbers, all without any. Raises NotFound for a missing one."""
    info = await bus.stream_info("DLQ")
    for first, last in [(one, one) for one in dict.fromkeys(numbers)] or [(info.first, info.last)]:
        found = False
        async for stored, _ in between(bus, StreamSelection("DLQ"), first, last):
            found = True
            yield read(stored)
        if numbers and not found:
            raise NotFound(
                f"there is no dead letter {first}", remedy="`spade bus dlq list` shows the letters."
            )


def grouped(letters: Sequence[StoredLetter]) -> list[tuple[int, StoredLetter]]:
    """Return (count, last letter) for each source, kind and reason, the largest group first.

    Numbers in a reason do not separate groups.
    """
    groups: dict[tuple[str, str, str], list[StoredLetter]] = {}
    for one in letters:
        key = (one.letter.source, one.message.kind, _VARYING.sub("#", one.reason))
        groups.setdefault(key, []).append(one)
    return sorted(((len(group), group[-1]) for group in groups.values()), key=lambda pair: -pair[0])


async def replay(bus: Bus, one: StoredLetter) -> None:
    """Publish the message of a letter again, then remove the letter.

    Raises BusError when the message cannot be published; the letter stays then.
    """
    letter, key = one.letter, f"retry:{one.letter.source}:{one.letter.sequence}"
    why = one.obstacle()
    if why is not None:
        raise BusError(f"letter {one.number} cannot be replayed: {why}", remedy="The letter stays.")
    stream, subject = bus.names.stream(letter.source), bus.names.subject(letter.subject)
    await bus.publisher.send(Outgoing(stream, subject, letter.frame, key))
    request = {"seq": one.number, "no_erase": True}
    await bus.connection.api(f"STREAM.MSG.DELETE.{bus.names.stream('DLQ')}", request)
