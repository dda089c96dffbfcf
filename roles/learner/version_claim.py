"""The learner's claim on version numbers: which number it goes on with, and the right to publish it."""

from __future__ import annotations

import socket
from pathlib import Path

import anyio
import msgspec

from bus import Bus, Conflict
from engine.errors import SpadeError
from engine.lineage import Lineage, Version

LINEAGE, CLAIM = "lineage", "learner"


class CheckpointsMissing(SpadeError):
    """The run has checkpoints, and none is in this directory. A retry cannot help."""

    exit_code = 2

    def __init__(self, place: Path, published: Version | None) -> None:
        reached = f", which has published version {published}," if published else ""
        super().__init__(
            f"The learner of this run{reached} has written checkpoints, and none of them is here",
            where=f"{place} on {socket.gethostname()}",
            remedy="Mount that directory, or copy it from the host where the learner ran, and start again. "
            "To begin at the starting model instead, and lose what was trained: learner.start_over=true, "
            "or another run with run.name=NAME.",
        )


def missing(noted: bool | None, published: Version | None, *, every: int) -> bool:
    """Return whether a learner that finds no checkpoint should have found one.

    ``noted`` says whether the run has one, None if unknown. An unknown run has one when the newest
    ``published`` version is not explained by a crash before the first checkpoint, at step ``every``.
    """
    if noted is None:
        return published is not None and published.step >= every
    return noted


def resume(
    own: Version, published: Version | None, known: Lineage, noted: Version | None = None
) -> tuple[Version, Lineage]:
    """Return the version under which the weights of ``own`` go on, and the lineage that leads there.

    ``own`` is the checkpoint's version, Version(0, 0) without one; ``published`` the newest one on the
    bus; ``known`` every fork so far; ``noted`` the last one that was about to be served (None without a
    note). When nothing or exactly ``own`` was published and noted last, ``own`` goes on: the numbers that
    follow it are unused. Otherwise the tree forks at its step with a new fence, so that no number is reused
    for other weights.
    """
    newest = known.forks[-1][0]
    if {published, noted} <= {None, own} and own.fence == newest:
        return own, known
    others = [version.fence for version in (published, noted) if version is not None]
    fence = 1 + max([newest, own.fence, *others])
    return Version(fence, own.step), known.fork(fence, own.step)


def merge(first: Lineage, second: Lineage) -> Lineage:
    """Return the lineage with the forks of both (each fence forked once)."""
    return Lineage(tuple(sorted({*first.forks, *second.forks})))


class ClaimNote(msgspec.Struct, frozen=True, kw_only=True):
    """The stored claim.

    ``version`` (packed) is the last one that anybody may have seen, stored before it is shown; ``lease`` the
    revision of the holder's lease; ``checkpoint`` whether the run has a checkpoint.
    """

    lease: int
    version: int
    checkpoint: bool = False


class VersionClaim:
    """The right to publish: a key that is renewed by compare-and-set.

    A displaced learner therefore cannot use a number that its successor may use.
    """

    def __init__(self, bus: Bus, *, lease: int) -> None:
        self._bus, self._lease = bus, lease
        self._revision, self._noted = 0, Version(0, 0)
        self._writing = anyio.Lock()
        self.checkpoint = False

    async def read(self) -> ClaimNote | None:
        """Return the note of the last learner, None when there was none."""
        stored = await self._bus.state_get(CLAIM)
        self._revision = stored[0] if stored else 0
        return msgspec.json.decode(stored[1], type=ClaimNote) if stored else None

    async def take(
        self, own: Version, published: Version | None, lineage: Lineage
    ) -> tuple[Version, Lineage]:
        """Settle and store under which version the weights of the checkpoint ``own`` go on.

        ``lineage`` holds the forks that the checkpoint knows. Returns the version and the lineage that leads
        there. A predecessor that is still alive may store once more in between: then everything is read
        again.
        """
        while True:
            note = await self.read()
            stored = await self._bus.state_get(LINEAGE)
            known = merge(lineage, msgspec.json.decode(stored[1], type=Lineage) if stored else Lineage())
            noted = Version.unpack(note.version) if note else None
            version, forked = resume(own, published, known, noted)
            await self._bus.state_put(LINEAGE, msgspec.json.encode(forked))
            self._noted = version
            try:
                await self._write()
            except Conflict:
                continue
            return version, forked

    async def renew(self, version: Version | None = None) -> None:
        """Store ``version`` before it is shown, None for the last one again.

        Raises SpadeError when another learner has taken over.
        """
        self._noted = version or self._noted
        try:
            async with self._writing:
                await self._write()
        except Conflict as error:
            raise SpadeError(
                f"Another learner has taken over; version {self._noted} was not published",
                remedy="Run one learner per bus.",
            ) from error

    async def _write(self) -> None:
        note = ClaimNote(lease=self._lease, version=self._noted.pack(), checkpoint=self.checkpoint)
        self._revision = await self._bus.state_update(CLAIM, msgspec.json.encode(note), self._revision)
