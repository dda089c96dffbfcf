"""Detects programs that are the same game for every seed.

Either the first observations differ, or something follows from the seed: the answers to actions that the
policies played, or the solutions. The values that the object holds after a reset tell the rest: a game of its
own verbs is not rejected.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from sandbox.errors import EnvFailure
from sandbox.probes import Transcript
from sandbox.trial import Trial


async def varies(trial: Trial) -> bool:
    """Return whether anything depends on the seed."""
    played = [by_seed.values() for name, by_seed in trial.played.items() if name != "random"]
    if len(set(trial.first.values())) > 1 or any(map(differ, played)):
        return True
    # compared in two instances, and in one of them again: counters do not count
    one, other = trial.seeds()[:2]
    held = []
    for seed in (one, other, one):
        await trial.open(seed)
        held.append(await trial.instance.state(seed))
    if held[0] == held[2] != held[1]:
        return True
    try:
        return "solution" in trial.instance.calls and (
            len({tuple(await trial.plan(seed)) for seed in trial.seeds()}) > 1
        )
    except EnvFailure:
        # its own rung says so
        return False


def differ(transcripts: Iterable[Transcript]) -> bool:
    """Return whether two transcripts part although their actions, as far as they are the same, do not."""
    return any(_parts(one, other) for one, other in itertools.combinations(transcripts, 2))


def _parts(one: Transcript, other: Transcript) -> bool:
    if one.first != other.first:
        return True
    for number, (first, second) in enumerate(zip(one.actions, other.actions, strict=False)):
        if first != second:
            return False
        if one.steps[number : number + 1] != other.steps[number : number + 1]:
            return True
    return False
