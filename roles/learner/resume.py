"""Which version a starting learner has. Pure."""

from __future__ import annotations

import socket
from pathlib import Path

from engine.errors import SpadeError
from engine.lineage import Lineage, Version


class CheckpointsMissing(SpadeError):
    """The run has checkpoints, and they are not here. Trying again is of no use."""

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
    """Whether a learner that finds no checkpoint should have found one.

    ``noted`` says whether the run has one. Where nobody said so, it has one when the newest version that
    was ``published`` is not explained by a crash before the first checkpoint, at step ``every``.
    """
    if noted is None:
        return published is not None and published.step >= every
    return noted


def resume(
    own: Version, published: Version | None, known: Lineage, noted: Version | None = None
) -> tuple[Version, Lineage]:
    """Return the version under which the weights of ``own`` go on, and the lineage that leads there.

    ``own`` is the checkpoint's version, Version(0, 0) without one; ``published`` the newest one on the
    bus; ``known`` every fork so far; ``noted`` the last one that was about to be served (None where nothing
    was noted). When nothing or exactly ``own`` was published and noted last, ``own`` goes on: the
    numbers that follow it are unused. Otherwise the tree forks at its step with a new fence, so that no
    number is reused for other weights.
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
