"""Policies that do not look at the game, and the judgement of a program that pays them (reward hacking).

The pay of an episode counts (:attr:`Transcript.returned`), so a program that pays everybody half is found as
well as one that lets everybody win half of the time. ``docs/environments.md`` lists the findings.

*Blind policies*: actions at random, always what paid most so far, new nonsense in each turn, and suspected
actions that were paid when they were tried. Such a policy must earn :data:`DEGENERATE_RATE` of its episodes
and of as many others, or be paid at least :data:`sandbox.probes.PAID` in all of them.

*A coin*: winning does not depend on the action. Up to four different actions that the program tells apart
from nonsense, or nonsense and what is plausible where it does not, are each played as constants on the same
instances. After 16, 32 and 64 instances, the program is a coin if either

- all actions agreed on every instance and at least three of sixteen were won: then, at 95 %, the action
  matters in fewer than one instance of five (``1 - 0.05 ** (1/16)`` is 0.17); or
- at the turn at which most was won, even the least lucky action's 95 % interval (Wilson) of the win rate
  lies above :data:`COIN_RATE`. Actions that exclude each other share the wins of a turn, so an honest guess
  among k options gives each 1 / k: one guess among three or more is not flagged, a guess between two is.

The toss begins only after blind policies won at least twice (or were paid 1.5 in parts), and ends as soon as
an action has won nothing in six instances or lies surely below the rate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial

from sandbox import actions
from sandbox.probes import PAID, WIN, Transcript
from sandbox.trial import BLIND, Choose, Trial

# The pay of an episode and its number of turns.
Outcome = tuple[float, int]
# Returns the action for what the first observation suggests, and for itself.
Act = Callable[[Sequence[str], str], str]

DEGENERATE_RATE, COIN_RATE = 0.9, 0.25
LEAST_EPISODES = 3
_LOOKS = (16, 32, 64)
_FIRST_LOOK, _LEAST_SHARE, _PANEL, _SUSPICIOUS = 6, 3 / 16, 4, 1.5
_CANDIDATES, _LIKELY, _TELLING, _SCANNED = 12, 8, 6, 16
_COIN_BLOCK, _SUSPECT_BLOCK = 4, 6
_RACED = 4
_Z = 1.959963984540054  # of a 95 % interval
_STEPS = 200  # reserved for the suspected actions
_USUAL_FORMATS = ("1 2", "1,2", "A1", "(1, 2)", "a b", "1. a")
_WORDS = {"random": "actions drawn at random", "babble": "a new text without meaning in each turn"}


def interval(won: float, played: int) -> tuple[float, float]:
    """Return the Wilson interval (95 %) of a rate; (0, 1) of nothing."""
    if played == 0:
        return 0.0, 1.0
    rate, square = won / played, _Z * _Z / played
    middle = (rate + square / 2) / (1 + square)
    half = _Z * math.sqrt(rate * (1 - rate) / played + square / (4 * played)) / (1 + square)
    # rounding must not put the rate outside of its own interval
    return max(0.0, min(rate, middle - half)), min(1.0, max(rate, middle + half))


async def play_policies(trial: Trial) -> None:
    """Play nonsense, then the blind policies, and set ``trial.hack`` when one of them is paid."""
    turns = trial.turns
    for action in actions.GARBAGE_CALLS if trial.instance.tools else actions.GARBAGE:
        choose = partial(actions.constant, turns=1, action=action)
        await trial.rollout(f"garbage {action}", trial.seeds()[0], choose)
    # the choices of each policy by the seed of an instance
    policies: dict[str, Callable[[int], Choose]] = {
        "random": lambda seed: partial(actions.guess, turns=turns, seed=seed),
        "babble": lambda _: partial(actions.babble, turns=turns),
    }
    for k, seed in enumerate(trial.seeds()):
        # long episodes: fewer seeds, so that steps are left for the constants
        if k >= LEAST_EPISODES and trial.budget < trial.settings.probe_steps // 2:
            break
        await trial.rollout("sweep", seed, partial(actions.sweep, turns=turns))
        await trial.rollout("random", seed, policies["random"](31 * k + 1))
    await _scan(trial)
    favourite = _favourite(trial)
    policies["constant"] = lambda _: partial(actions.constant, turns=turns, action=favourite)
    for k, seed in enumerate(trial.seeds(1)):
        if favourite not in trial.invalid or k == 0:
            await trial.rollout("constant", seed, policies["constant"](seed))
        if k < LEAST_EPISODES or any(trial.returns("babble")):
            await trial.rollout("babble", seed, policies["babble"](seed))
    policies |= await _suspects(trial)
    for name in paid_blindly(trial):
        # a few lucky episodes are not a verdict: play as many again
        for seed in trial.seeds(2):
            await trial.rollout(name, seed, policies[name](seed))
    if found := paid_blindly(trial):
        best = max(found, key=trial.rate)
        trial.hack = paid(
            trial, best, _WORDS.get(best, f"always {favourite!r}" if best == "constant" else best)
        )
    elif sum(sum(trial.returns(name)) for name in ("sweep", *BLIND)) >= _SUSPICIOUS:
        await _toss(trial)


async def _scan(trial: Trial) -> None:
    """Try the actions that the sweeps did not come to, as long as nothing has won: one may always win."""
    seed = trial.seeds()[0]
    start = max((len(t.actions) for t in trial.played.get("sweep", {}).values()), default=0)
    known = trial.actions(trial.first[seed])
    while start < min(len(known), _SCANNED) and not any(t.won for t in trial.transcripts):
        name = f"scan from {start}"
        await trial.rollout(name, seed, partial(actions.sweep, turns=trial.turns, start=start))
        start += max((len(t.actions) for t in trial.played.get(name, {}).values()), default=1)


def paid(trial: Trial, policy: str, what: str) -> str:
    """Return the finding that ``policy``, ``what`` in words, is paid without looking."""
    returns = trial.returns(policy)
    won, played, least = sum(returns), len(returns), min(returns)
    if won < DEGENERATE_RATE * played:
        return f"pays for form: {what} was paid at least {least:g} in each of {played} instances"
    return f"won without looking: {what} won {won:g} of {played} instances"


def paid_blindly(trial: Trial) -> list[str]:
    """Return the blind policies that are nearly always paid in full, or always in part."""
    found = []
    for name in trial.blind:
        returns = trial.returns(name)
        enough = len(returns) >= LEAST_EPISODES
        if enough and (trial.rate(name) >= DEGENERATE_RATE or min(returns) >= PAID):
            found.append(name)
    return found


async def _suspects(trial: Trial) -> dict[str, Callable[[int], Choose]]:
    """Play actions that were paid on trial in six instances; those that are always paid are blind policies.

    Returns the choices of each such policy by the seed of an instance.
    """
    trial.budget = max(trial.budget, _STEPS)
    (seed,) = trial.seeds(_SUSPECT_BLOCK, 1)
    found: dict[str, Callable[[int], Choose]] = {}
    first, raced = await trial.open(seed), 0
    for name, act in _acts(trial).items():
        tried = await trial.episode(seed, iter([act(trial.actions(first), first)]))
        trial.judge_error(f"garbage {name}", tried)
        if tried.returned < PAID or raced == _RACED:
            continue
        raced += 1
        for other in trial.seeds(1):
            await trial.rollout(name, other, _by(trial, act, other))
            played = trial.played.get(name, {}).get(other)
            if played is None or played.returned < PAID:
                break
        else:
            found[name] = partial(_by, trial, act)
    trial.blind += found
    return found


def _acts(trial: Trial) -> dict[str, Act]:
    texts = [] if trial.toolbox else [*actions.literals(trial.source)]
    texts += [
        transcript.actions[-1]
        for name, by_seed in trial.played.items()
        for transcript in by_seed.values()
        if name.startswith("garbage") and transcript.returned >= PAID
    ]
    acts: dict[str, Act] = {f"always {text!r}": partial(_fixed, text) for text in texts}
    acts["an essay about nothing"] = partial(_fixed, actions.ESSAY)
    acts["a long text with something of everything"] = partial(_fixed, actions.RAMBLE)
    acts["the observation said back"] = lambda _, first: first.strip()
    acts["everything it suggests at once"] = actions.at_once
    for number in range(0 if trial.toolbox else len(_USUAL_FORMATS)):
        acts[f"its format number {number + 1} with numbers in it"] = partial(_format, number)
    return acts


def _fixed(text: str, _: Sequence[str], __: str) -> str:
    return text


def _format(number: int, _: Sequence[str], first: str) -> str:
    return (*actions.formats(first), *_USUAL_FORMATS)[number]


def _by(trial: Trial, act: Act, seed: int) -> Choose:
    return lambda known: actions.constant(known, trial.turns, act(known, trial.first[seed]))


async def _toss(trial: Trial) -> None:
    """Set ``trial.hack`` when winning does not depend on the action at all."""
    results: dict[str, list[Outcome]] = {}
    seeds = trial.seeds(_COIN_BLOCK, trial.settings.coin_seeds)

    async def wins_early(action: str) -> bool:
        results[action] = []
        await _play(trial, action, seeds[:_FIRST_LOOK], results)
        return sum(paid for paid, _ in results[action]) >= WIN

    async for action in _understood(trial):
        if not await wins_early(action):
            return
        if len(results) == _PANEL:
            break
    if len(results) < 2:
        # the program answers all of it alike
        nonsense = [actions.NONSENSE] if actions.NONSENSE not in trial.invalid else []
        for action in [*nonsense, *_candidates(trial)[:_LIKELY]]:
            if action not in results and not await wins_early(action):
                return
    if len(results) < 2:
        # every action is refused by now: there is nothing to toss with
        return
    for look in _LOOKS:
        for action in results:
            await _play(trial, action, seeds[len(results[action]) : look], results)
        trial.hack = coin(results, COIN_RATE)
        least = _least(results, _best_turn(results))
        if trial.hack or look > len(seeds) or interval(least, look)[1] < COIN_RATE:
            break
    if trial.hack:
        trial.tossed = _least(results), min(map(len, results.values()))


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
    """Return the turn at which most was won."""
    paid: Counter[int] = Counter()
    for outcomes in results.values():
        for won, turn in outcomes:
            paid[turn] += won  # type: ignore[assignment]
    return paid.most_common(1)[0][0]


def _least(results: dict[str, list[Outcome]], turn: int | None = None) -> float:
    """Return what the least lucky action won, in all or at one turn."""
    return min(sum(paid for paid, when in outcomes if turn in (None, when)) for outcomes in results.values())


async def _understood(trial: Trial) -> AsyncIterator[str]:
    """Yield the actions that the program answers otherwise than nonsense, in some instance."""
    seeds = trial.seeds()[:_TELLING]
    refused: dict[int, Transcript] = {}
    for action in _candidates(trial):
        for seed in seeds:
            if seed not in refused:
                refused[seed] = await trial.episode(seed, iter([actions.NONSENSE]))
            if _told_apart(await trial.episode(seed, iter([action])), refused[seed]):
                yield action
                break


def _candidates(trial: Trial) -> list[str]:
    known = trial.actions(trial.first[trial.seeds()[0]])
    valid = [action for action in known if action not in trial.invalid]
    # what the text suggests most comes first
    return [*spread(valid[:_LIKELY]), *spread(valid[_LIKELY:])][:_CANDIDATES]


async def _play(trial: Trial, action: str, seeds: Sequence[int], results: dict[str, list[Outcome]]) -> None:
    for seed in seeds:
        played = await trial.episode(seed, iter([action] * trial.turns))
        results[action].append((played.returned, len(played.steps)))


def spread(items: Sequence[str]) -> Iterator[str]:
    """Yield the items in an order in which any first few lie far apart."""
    seen: set[int] = set()
    size = 1 << max(1, (len(items) - 1).bit_length())
    step = size
    while step >= 1 and items:
        for place in range(0, size, step):
            if place < len(items) and place not in seen:
                seen.add(place)
                yield items[place]
        step //= 2


def _told_apart(one: Transcript, other: Transcript) -> bool:
    """Return whether two first actions were answered differently, apart from being named in the answer."""
    if not one.steps or not other.steps:
        return (one.error_type, len(one.steps)) != (other.error_type, len(other.steps))
    first, second = one.steps[0], other.steps[0]
    if (first.done, first.reward) != (second.done, second.reward):
        return True
    plain = first.observation == second.observation
    return not plain and _unnamed(one) != _unnamed(other)


def _unnamed(transcript: Transcript) -> str:
    action, text = transcript.actions[0], transcript.steps[0].observation
    return text.replace(action, "\0") if action else text


def _favourite(trial: Trial) -> str:
    """Return the last action of what paid most, else what the text suggests first."""
    paid: Counter[str] = Counter()
    for transcript in trial.transcripts:
        if transcript.returned > 0:
            paid[transcript.actions[-1]] += transcript.returned  # type: ignore[assignment]
    return paid.most_common(1)[0][0] if paid else trial.actions(next(iter(trial.first.values())))[0]
