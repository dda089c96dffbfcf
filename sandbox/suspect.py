"""Actions that a program may have been written to pay for: each is tried, and played blindly if it won.

A hint can name a word that no player would think of; it stands somewhere in the source. And a careless
test of an action (is it long, does it contain the answer?) is passed by a text that contains everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from sandbox import probes
from sandbox.climb import Choose, Climb
from sandbox.errors import EnvError
from sandbox.probes import Transcript

# Given what the first observation suggests, and itself, the action.
Act = Callable[[Sequence[str], str], str]

_INSTANCES, _RACED, _LOSSES, _BLOCK = 2, 3, 1, 6
_STEPS = 200  # are kept for this, whatever the other policies used


async def play(climb: Climb) -> dict[str, Callable[[int], Choose]]:
    """Play what won when it was tried in six instances, and put what kept winning among the blind policies.

    Returns how the policies choose in the instance of a seed.
    """
    climb.budget = max(climb.budget, _STEPS)
    acts = _acts(climb)
    won: list[str] = []
    left = dict(acts)
    for seed in climb.seeds(_BLOCK, _INSTANCES):
        won += await _try(climb, seed, left)
    found: dict[str, Callable[[int], Choose]] = {}
    for name in won[:_RACED]:
        chooses = partial(_chooses, climb, acts[name])
        losses = 0
        for seed in climb.seeds(1):
            await climb.rollout(name, seed, chooses(seed))
            played = climb.played.get(name, {}).get(seed)
            losses += played is None or not played.won
            if losses > _LOSSES:
                break
        else:
            found[name] = chooses
    climb.blind += found
    return found


def _acts(climb: Climb) -> dict[str, Act]:
    texts = [] if climb.toolbox else [*probes.literals(climb.source)]
    texts += [
        transcript.actions[-1]
        for name, by_seed in climb.played.items()
        for transcript in by_seed.values()
        if name.startswith("garbage") and transcript.won
    ]
    acts: dict[str, Act] = {f"always {text!r}": partial(_fixed, text) for text in texts}
    acts["a long text with something of everything"] = partial(_fixed, probes.RAMBLE)
    acts["the observation said back"] = lambda _, first: first.strip()
    acts["everything it suggests at once"] = probes.at_once
    return acts


async def _try(climb: Climb, seed: int, acts: dict[str, Act]) -> list[str]:
    """The names of ``acts`` that won when they were played one after the other, over as many episodes.

    What won, and what the program refused by raising, is taken out of ``acts``.
    """
    won, left = [], list(acts)
    while left and climb.budget > 0:
        first = await climb.open(seed)
        known = climb.actions(first)
        while left and climb.budget > 0:
            name = left.pop(0)
            action = acts[name](known, first)
            climb.budget -= 1
            try:
                step = await climb.instance.step(action)
            except EnvError as error:
                refused = Transcript(first, (action,), (), str(error), error.type, error.phase)
                climb.judge_error(f"garbage {name}", refused)
                del acts[name]
                continue
            if Transcript(first, (action,), (step,)).won:
                del acts[name]
                won.append(name)
            if step.done:
                break
    return won


def _chooses(climb: Climb, act: Act, seed: int) -> Choose:
    return lambda known: probes.constant(known, climb.turns, act(known, climb.first[seed]))


def _fixed(text: str, _: Sequence[str], __: str) -> str:
    return text
