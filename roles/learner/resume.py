"""Which version a starting learner has. Pure."""

from __future__ import annotations

from engine.lineage import Lineage, Version


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
