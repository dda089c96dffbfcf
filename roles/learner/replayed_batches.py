"""What abandoned branches trained, from the facts on the bus."""

from __future__ import annotations

from bus import Bus
from bus.messages import BatchTrained
from engine.lineage import Lineage, Version
from engine.training.sample_age import Branches, BranchesState

_TRAINED = "event.learner.trained"


async def branches(
    bus: Bus, own: Version, lineage: Lineage, state: BranchesState, *, settings: bytes = b""
) -> Branches:
    """Return how far older branches are shared with the one that starts at ``own`` under ``settings``.
    ``lineage`` leads there, ``state`` is its checkpoint's; what was trained since is read from the bus.
    """
    found = Branches(own, lineage, state, settings=settings)
    if len(lineage.forks) > 1:  # the first life has nothing to repeat
        start = min(state.position, (await bus.stream_info("EVENT")).last) + 1
        async for record in bus.replay("EVENT", start=start, tails=(_TRAINED,)):
            if isinstance(record.message, BatchTrained):
                found.heard(record.message)
                found.position = record.sequence
    return found
