"""Whether the seed makes a difference: in what is seen, or in what follows from the same actions.

A first observation may be the same for all instances. Then something must follow from the seed for
some sequence of actions; the search for one is cheap first: what the policies played anyway, the rest of the
plausible actions, the reference solution of one instance played on another, and a bisection, which
finds the place where the answers to growing numbers change, however wide the range is. Where the right words
are not found, what the object holds after a reset tells: a game of its own verbs is not rejected for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial

from sandbox import probes
from sandbox.errors import EnvFailure
from sandbox.probes import Transcript
from sandbox.validation_context import Climb

_LADDER = (-1000000, -1000, -1, 0, 1, 10, 100, 1000, 10000, 1000000, 1000000000)
_HALVINGS, _EDGES = 34, 4


async def vary(climb: Climb) -> None:
    """Set ``climb.varies``."""
    climb.varies = len(set(climb.first.values())) > 1 or any(
        differ(by_seed.values()) for name, by_seed in climb.played.items() if name != "random"
    )
    for search in (_sweep_on, _cross, _bisect, _inside):
        if climb.varies:
            return
        await search(climb)


async def _sweep_on(climb: Climb) -> None:
    """Go on with the actions that the longest episode so far did not come to."""
    actions = climb.actions(climb.first[climb.seeds()[0]])
    start, name = 0, "sweep"
    while not climb.varies and climb.budget > 0 and climb.played.get(name):
        start += max(len(transcript.actions) for transcript in climb.played[name].values())
        if start >= len(actions):
            return
        name = f"sweep from {start}"
        choose = partial(probes.sweep, turns=climb.turns, start=start)
        # twice the seeds: a coin drawn from six of them is the same for all every 32nd time
        for seed in (*climb.seeds(), *climb.seeds(3)):
            await climb.rollout(name, seed, choose)
            climb.varies = differ(climb.played.get(name, {}).values())
            if climb.varies:
                return


async def _cross(climb: Climb) -> None:
    """Play each instance by the solution of another one."""
    if "solution" not in climb.instance.calls or climb.settings.solution == "ignore":
        return
    plans: dict[int, list[str]] = {}
    for seed in climb.seeds():
        await climb.open(seed)
        try:
            plans[seed] = probes.solution_actions(await climb.instance.call("solution"))
        except EnvFailure:
            # its own rung says so
            return
    for plan in {tuple(plan): plan for plan in plans.values()}.values():
        played = [await climb.episode(seed, iter(plan[: climb.turns])) for seed in plans]
        climb.varies = differ(played)
        if climb.varies:
            return


async def _bisect(climb: Climb) -> None:
    """Find two neighbouring numbers that one instance answers differently; ask the others about them."""
    seed, *others = (*climb.seeds(), *climb.seeds(3))
    answers = {number: await _ask(climb, seed, number) for number in _LADDER}
    edges = [(low, high) for low, high in itertools.pairwise(_LADDER) if answers[low] != answers[high]]
    for low, high in edges[:_EDGES]:
        below, halvings = answers[low], 0
        while high - low > 1 and halvings < _HALVINGS:
            middle, halvings = (low + high) // 2, halvings + 1
            if await _ask(climb, seed, middle) == below:
                low = middle
            else:
                high = middle
        here = [await _ask(climb, seed, number) for number in (low, high)]
        for other in others:
            if [await _ask(climb, other, number) for number in (low, high)] != here:
                climb.varies = True
                return


async def _ask(climb: Climb, seed: int, number: int) -> tuple[str, float, bool]:
    """The answer to one number as the first action, without the number itself."""
    played = await climb.episode(seed, iter([str(number)]))
    if not played.steps:
        return played.error_type, 0.0, False
    step = played.steps[0]
    return step.observation.replace(str(number), "\0"), step.reward, step.done


async def _inside(climb: Climb) -> None:
    """Compare what the object holds in two instances, and in one of them again: counters do not count."""
    one, other = climb.seeds()[:2]
    held = []
    for seed in (one, other, one):
        await climb.open(seed)
        held.append(await climb.instance.state(seed))
    climb.varies = held[0] == held[2] != held[1]


def differ(transcripts: Iterable[Transcript]) -> bool:
    """Whether two transcripts part although their actions, as far as they are the same, do not."""
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
