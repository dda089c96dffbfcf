"""Detects programs that are the same game for every seed.

Either the first observations differ, or something follows from the seed for some actions: those that the
policies played anyway, the rest of the plausible ones, the solution of one instance played on another. The
values that the object holds after a reset tell the rest: a game of its own verbs is not rejected.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial

from sandbox import actions
from sandbox.errors import EnvFailure
from sandbox.probes import Transcript
from sandbox.trial import Trial


async def vary(trial: Trial) -> None:
    """Set ``trial.varies``."""
    trial.varies = len(set(trial.first.values())) > 1 or any(
        differ(by_seed.values()) for name, by_seed in trial.played.items() if name != "random"
    )
    for search in (_inside, _cross, _sweep_on):
        if trial.varies:
            return
        await search(trial)


async def _sweep_on(trial: Trial) -> None:
    """Go on with the actions that the longest episode so far did not come to."""
    known = trial.actions(trial.first[trial.seeds()[0]])
    start, name = 0, "sweep"
    while not trial.varies and trial.budget > 0 and trial.played.get(name):
        start += max(len(transcript.actions) for transcript in trial.played[name].values())
        if start >= len(known):
            return
        name = f"sweep from {start}"
        choose = partial(actions.sweep, turns=trial.turns, start=start)
        # twice the seeds: a coin drawn from six of them is the same for all every 32nd time
        for seed in (*trial.seeds(), *trial.seeds(3)):
            await trial.rollout(name, seed, choose)
            trial.varies = differ(trial.played.get(name, {}).values())
            if trial.varies:
                return


async def _cross(trial: Trial) -> None:
    """Play each instance by the solution of another one."""
    if "solution" not in trial.instance.calls or trial.settings.solution == "ignore":
        return
    try:
        plans = {tuple(await trial.plan(seed)) for seed in trial.seeds()}
    except EnvFailure:
        # its own rung says so
        return
    for plan in plans:
        played = [await trial.episode(seed, iter(plan[: trial.turns])) for seed in trial.seeds()]
        trial.varies = differ(played)
        if trial.varies:
            return


async def _inside(trial: Trial) -> None:
    """Compare what the object holds in two instances, and in one of them again: counters do not count."""
    one, other = trial.seeds()[:2]
    held = []
    for seed in (one, other, one):
        await trial.open(seed)
        held.append(await trial.instance.state(seed))
    trial.varies = held[0] == held[2] != held[1]


def differ(transcripts: Iterable[Transcript]) -> bool:
    """Return whether two transcripts part although their actions, as far as they are the same, do not."""
    return any(_parts(one, other) for one, other in itertools.combinations(transcripts, 2))


def _parts(one: Transcript, other: Transcript) -> bool:
    if one.first != other.first:
        return True
    for number, (first, second) in enumerate(zip(one.actions, other.actions, strict=False)):
        if first != second:
            return False
        if one.seen[number : number + 1] != other.seen[number : number + 1]:
            return True
    return False
