"""Policies that do not look, and what it means when they are paid (canaries for reward hacking).

What counts is what an episode pays (:attr:`Transcript.returned`), so a program that pays everybody half is
found as well as one that lets everybody win half of the time; "won" stands for the sum below. Two findings
make a program ``degenerate``:

*given away*: a blind policy (at random, always the same action, the empty action, nonsense) wins at least
``degenerate_rate`` of its episodes and, played again, of as many others. What is suspected besides,
because it won when it was tried once: short texts of the program's own source, a long text with something
of everything, the first observation said back, and all that it suggests in one action.

*coin*: winning does not hang on what is played. Up to four different actions that the program tells apart
from nonsense, or nonsense and what is plausible where it does not, are each played as constants on the same
instances. Looked at after 16, 32 and 64 instances, the program is a coin if either

- all actions agreed on every instance and at least three of sixteen were won: then, at 95 %, the action
  matters in fewer than one instance of five (``1 - 0.05 ** (1/16)`` is 0.17); what pays less than
  that is too little for a designer to gain by; or
- at the turn at which most was won, even the least lucky action's 95 % interval (Wilson) of the win rate
  lies above ``coin_rate``. Actions that exclude each other share the wins of a turn, so an honest guess among
  k options gives each 1 / k: a guess among three or more is not flagged, however many tries there are; a
  guess between two is.

The toss begins only after blind policies won at least twice (or were paid 1.5 in parts), and ends as soon as
an action has won nothing in six instances or lies surely below ``coin_rate``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial

from sandbox import exploit_probes, probes
from sandbox.probes import Transcript
from sandbox.validation_context import Choose, Climb
from sandbox.verdict import BLIND

# What an episode paid, and how many turns it took.
Outcome = tuple[float, int]

LEAST_EPISODES = 3
_LOOKS = (16, 32, 64)
_FIRST_LOOK, _LEAST_SHARE, _PANEL, _SUSPICIOUS = 6, 3 / 16, 4, 1.5
_CANDIDATES, _LIKELY, _TELLING, _SCANNED = 12, 8, 6, 16
_COIN_BLOCK = 4


def interval(won: float, played: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson interval of a rate; (0, 1) of nothing."""
    if played == 0:
        return 0.0, 1.0
    rate, square = won / played, z * z / played
    middle = (rate + square / 2) / (1 + square)
    half = z * math.sqrt(rate * (1 - rate) / played + square / (4 * played)) / (1 + square)
    # rounding must not put the rate outside of its own interval
    return max(0.0, min(rate, middle - half)), min(1.0, max(rate, middle + half))


async def play_policies(climb: Climb) -> None:
    """Play by policies that do not look; the constant is what won most often before."""
    turns, settings = climb.turns, climb.settings
    for k, seed in enumerate(climb.seeds()):
        # long episodes: fewer seeds, so that steps are left for the constants
        if k >= LEAST_EPISODES and climb.budget < settings.probe_steps // 2:
            break
        await climb.rollout("sweep", seed, partial(probes.sweep, turns=turns))
        await climb.rollout("random", seed, partial(probes.guess, turns=turns, seed=31 * k + 1))
    await _scan(climb)
    constants = {"constant": _favourite(climb), "empty": ""}
    if any(t.won for name in climb.played if name.startswith("garbage") for t in climb.played[name].values()):
        constants["nonsense"] = probes.NONSENSE
    for seed in climb.seeds(1):
        for name, action in constants.items():
            # what was refused by raising once cannot win
            if action not in climb.invalid or name not in climb.played:
                await climb.rollout(name, seed, _constant(turns, action))
    suspected = await exploit_probes.play(climb)
    for name in given_away(climb):
        # a few lucky episodes are not a verdict: play as many again
        for seed in climb.seeds(2):
            choose: Choose = partial(probes.guess, turns=turns, seed=seed)
            if name in constants:
                choose = _constant(turns, constants[name])
            elif name in suspected:
                choose = suspected[name](seed)
            await climb.rollout(name, seed, choose)
    await _judge(climb, constants["constant"])


async def _scan(climb: Climb) -> None:
    """Where nothing has won yet, try what the sweeps did not come to: some word may always win."""
    seed = climb.seeds()[0]
    start = max((len(t.actions) for t in climb.played.get("sweep", {}).values()), default=0)
    actions = climb.actions(climb.first[seed])
    while start < min(len(actions), _SCANNED) and not any(t.won for t in climb.transcripts):
        name = f"scan from {start}"
        await climb.rollout(name, seed, partial(probes.sweep, turns=climb.turns, start=start))
        start += max((len(t.actions) for t in climb.played.get(name, {}).values()), default=1)


def paid(climb: Climb, policy: str, what: str) -> str:
    """Say that ``policy``, ``what`` in words, wins without looking."""
    won, played = climb.wins(policy)
    return f"won without looking: {what} won {won:g} of {played} instances"


def given_away(climb: Climb) -> list[str]:
    """Blind policies that reached the threshold in enough episodes."""
    return [
        name
        for name in climb.blind
        if climb.wins(name)[1] >= LEAST_EPISODES and climb.rate(name) >= climb.settings.degenerate_rate
    ]


async def _judge(climb: Climb, constant: str) -> None:
    found = given_away(climb)
    if found:
        best = max(found, key=climb.rate)
        what = {
            "random": "actions drawn at random",
            "constant": f"always {constant!r}",
            "empty": "the empty action",
            "nonsense": f"{probes.NONSENSE!r}, which means nothing",
        }
        climb.hack = paid(climb, best, what.get(best, best))
    elif sum(climb.wins(name)[0] for name in BLIND) >= _SUSPICIOUS:
        await _toss(climb)


async def _toss(climb: Climb) -> None:
    """See whether winning hangs on the action at all."""
    results: dict[str, list[Outcome]] = {}
    seeds = climb.seeds(_COIN_BLOCK, climb.settings.coin_seeds)

    async def wins_early(action: str) -> bool:
        results[action] = []
        await _play(climb, action, seeds[:_FIRST_LOOK], results)
        return sum(paid for paid, _ in results[action]) >= probes.WIN

    async for action in _understood(climb):
        if not await wins_early(action):
            return
        if len(results) == _PANEL:
            break
    if len(results) < 2:
        for action in _whatever(climb):
            if action not in results and not await wins_early(action):
                return
    if len(results) < 2:
        # every action is refused by now: there is nothing to toss with
        return
    for look in _LOOKS:
        for action in results:
            await _play(climb, action, seeds[len(results[action]) : look], results)
        climb.hack = coin(results, climb.settings.coin_rate)
        least = _least(results, _best_turn(results))
        if climb.hack or look > len(seeds) or interval(least, look)[1] < climb.settings.coin_rate:
            break
    if climb.hack:
        climb.tossed = _least(results), min(map(len, results.values()))


def coin(results: dict[str, list[Outcome]], rate: float) -> str:
    """Judge the outcomes of constant actions on the same instances; "" when they look honest."""
    played = len(next(iter(results.values())))
    if len(results) < 2 or played < _LOOKS[0]:
        return ""
    least = _least(results)
    agreed = all(len({paid for paid, _ in same}) == 1 for same in zip(*results.values(), strict=True))
    if agreed and least >= _LEAST_SHARE * played:
        return (
            f"a coin decides: {len(results)} different actions gave the same outcome in all {played} "
            f"instances, and won {least:g} of them"
        )
    least = _least(results, _best_turn(results))
    low, high = interval(least, played)
    if low > rate:
        return (
            f"a coin decides: each of {len(results)} different actions, played blindly, wins; the least "
            f"lucky one won {least:g} of {played} instances ({low:.0%} to {high:.0%})"
        )
    return ""


def _best_turn(results: dict[str, list[Outcome]]) -> int:
    """The turn at which most was won."""
    paid: Counter[int] = Counter()
    for outcomes in results.values():
        for won, turn in outcomes:
            paid[turn] += won  # type: ignore[assignment]
    return paid.most_common(1)[0][0]


def _least(results: dict[str, list[Outcome]], turn: int | None = None) -> float:
    """What the least lucky action won, in all or at one turn."""
    return min(sum(paid for paid, when in outcomes if turn in (None, when)) for outcomes in results.values())


async def _understood(climb: Climb) -> AsyncIterator[str]:
    """Actions that the program answers otherwise than nonsense, in some instance."""
    seeds = climb.seeds()[:_TELLING]
    refused: dict[int, Transcript] = {}
    for action in _candidates(climb):
        for seed in seeds:
            if seed not in refused:
                refused[seed] = await climb.episode(seed, iter([probes.NONSENSE]))
            if _told_apart(await climb.episode(seed, iter([action])), refused[seed]):
                yield action
                break


def _whatever(climb: Climb) -> list[str]:
    """Where nothing differs from nonsense: nonsense, and what the text suggests."""
    nonsense = [probes.NONSENSE] if probes.NONSENSE not in climb.invalid else []
    return [*nonsense, *_candidates(climb)[:_LIKELY]]


def _candidates(climb: Climb) -> list[str]:
    known = climb.actions(climb.first[climb.seeds()[0]])
    actions = [action for action in known if action not in climb.invalid]
    # what the text suggests most comes first
    return [*spread(actions[:_LIKELY]), *spread(actions[_LIKELY:])][:_CANDIDATES]


async def _play(climb: Climb, action: str, seeds: Sequence[int], results: dict[str, list[Outcome]]) -> None:
    for seed in seeds:
        played = await climb.episode(seed, iter([action] * climb.turns))
        results[action].append((played.returned, len(played.steps)))


def spread(actions: Sequence[str]) -> Iterator[str]:
    """The actions in an order in which any first few lie far apart."""
    seen: set[int] = set()
    size = 1 << max(1, (len(actions) - 1).bit_length())
    step = size
    while step >= 1 and actions:
        for place in range(0, size, step):
            if place < len(actions) and place not in seen:
                seen.add(place)
                yield actions[place]
        step //= 2


def _told_apart(one: Transcript, other: Transcript) -> bool:
    """Whether two first actions were answered differently, apart from being named in the answer."""
    if not one.steps or not other.steps:
        return (one.error_type, len(one.steps)) != (other.error_type, len(other.steps))
    first, second = one.steps[0], other.steps[0]
    if first.done != second.done:
        return True
    plain = first.observation == second.observation
    return not plain and _unnamed(one) != _unnamed(other)


def _unnamed(transcript: Transcript) -> str:
    action, text = transcript.actions[0], transcript.steps[0].observation
    return text.replace(action, "\0") if action else text


def _favourite(climb: Climb) -> str:
    """The last action of what paid most, else what the text suggests first."""
    paid: Counter[str] = Counter()
    for transcript in climb.transcripts:
        if transcript.returned > 0:
            paid[transcript.actions[-1]] += transcript.returned  # type: ignore[assignment]
    return paid.most_common(1)[0][0] if paid else climb.actions(next(iter(climb.first.values())))[0]


def _constant(turns: int, action: str) -> Choose:
    return partial(probes.constant, turns=turns, action=action)
