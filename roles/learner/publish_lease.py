"""Who may publish, and which number is used next: what the learner keeps in the state of the bus."""

from __future__ import annotations

import msgspec

from bus import Bus, Conflict
from engine.errors import SpadeError
from engine.lineage import Lineage, Version
from roles.learner.resume import merge, resume

LINEAGE, CLAIM = "lineage", "learner"


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """``version`` (packed) is the last one that anybody may have seen, written down before the first could;
    ``lease`` the revision of the holder's lease; ``checkpoint`` whether the run has one, None where the
    writer did not say.
    """

    lease: int
    version: int
    checkpoint: bool | None = None


class Claim:
    """The right to publish: a key that is renewed by compare-and-set, so that a displaced learner cannot
    use a number that its successor may use.
    """

    def __init__(self, bus: Bus, *, lease: int) -> None:
        self._bus, self._lease = bus, lease
        self._revision = 0
        self.checkpoint = False

    async def read(self) -> Note | None:
        """Return what the last learner wrote down, None when there was none."""
        stored = await self._bus.state_get(CLAIM)
        self._revision = stored[0] if stored else 0
        return msgspec.json.decode(stored[1], type=Note) if stored else None

    async def take(
        self, own: Version, published: Version | None, lineage: Lineage
    ) -> tuple[Version, Lineage]:
        """Settle under which version the weights of the checkpoint ``own`` go on, and write it down.

        ``lineage`` is what the checkpoint knows of the forks. Returns the version and the lineage that leads
        there. A predecessor that is not quite dead may write once more in between: then all of it is looked
        at again.
        """
        while True:
            note = await self.read()
            stored = await self._bus.state_get(LINEAGE)
            known = merge(lineage, msgspec.json.decode(stored[1], type=Lineage) if stored else Lineage())
            noted = Version.unpack(note.version) if note else None
            version, forked = resume(own, published, known, noted)
            await self._bus.state_put(LINEAGE, msgspec.json.encode(forked))
            try:
                await self._write(version)
            except Conflict:
                continue
            return version, forked

    async def renew(self, version: Version) -> None:
        """Write down ``version``, before anybody may see it. Raises SpadeError when another learner has
        taken over.
        """
        try:
            await self._write(version)
        except Conflict as error:
            raise SpadeError(
                f"Another learner has taken over; version {version} was not published",
                remedy="Run one learner a bus.",
            ) from error

    async def _write(self, version: Version) -> None:
        note = Note(lease=self._lease, version=version.pack(), checkpoint=self.checkpoint)
        self._revision = await self._bus.state_update(CLAIM, msgspec.json.encode(note), self._revision)
