"""Detects pay for form and pay for luck by the solutions of many instances.

The plan of one instance, carried out in another one, is well-formed and wrong. So is an instance's own plan
with other words in place of those that its first observation does not hold. A program that pays them pays for
form.

Where the feedback tells the instances apart in nothing but the win, trying one possible answer after the
other is all that can be done. A program is *luck* when that wins surely more than a third of the instances,
or when instances begin with the same words, need different answers, and answer alike to everything.
"""

from __future__ import annotations

import random
import re
import string
from collections import defaultdict
from collections.abc import Sequence

from sandbox import actions
from sandbox.errors import EnvFailure
from sandbox.probes import tell
from sandbox.trial import Rejected, Trial
from sandbox.trivial_policies import interval, paid, paid_blindly

_ANOTHER, _FORM = "the solution of another instance", "its solution with other words and numbers"
_BY_HEART = "always the same plan"
_FORM_BLOCK, _LUCK_BLOCK, _PLANS, _ALIKE, _TRIED = 7, 8, 32, 3, 8
_LUCKY, _LOOKS = 1 / 3, (64, 128)
_VERBS = ("look", "help", "inspect", "examine", "status", "hint", "read", "ask", "open", "go")
_TOKEN = re.compile(r"\w+|[^\w\s]|\s+")


async def check_solution(trial: Trial) -> None:
    """Raise Rejected unless ``solution()`` wins; a program that offers a solution must be won by it."""
    for seed in trial.seeds()[:3]:
        try:
            plan = await trial.plan(seed)
            # begun again: asking must not change the game
            played = await trial.episode(seed, iter(_repeated(trial, plan)))
        except EnvFailure as error:
            raise Rejected("solution", f"solution(): {tell(error)}") from None
        if not played.won:
            why = f"pays {played.returned:g}, which does not win"
            if any(step.reward > 0 and not step.terminated for step in played.steps):
                why += "; only the reward of a step that sets terminated counts"
            raise Rejected("solution", f"solution() gave {plan[:4]} for seed {seed}: it {why}")
        trial.played.setdefault("solution", {})[seed] = played


async def play_wrong_plans(trial: Trial) -> None:
    """Set ``trial.hack`` when plans that are wrong are paid, or one plan wins everywhere."""
    plans = [trial.plans[seed] for seed in trial.played["solution"]]
    if all(plan == plans[0] for plan in plans):
        for seed in (*trial.seeds(1), *trial.seeds(2)):
            played = await trial.episode(seed, iter(plans[0][: trial.turns]))
            trial.played.setdefault(_BY_HEART, {})[seed] = played
            if not played.won:
                break
        else:
            trial.blind.append(_BY_HEART)
            trial.hack = paid(trial, _BY_HEART, f"{_BY_HEART} {plans[0][:4]}")
            return
    seeds = trial.seeds(_FORM_BLOCK, 2 * trial.settings.seeds)
    for k, seed in enumerate(seeds):
        own, other = await _plan(trial, seed), await _plan(trial, seeds[k - 1])
        if other and other != own:
            await _record(trial, _ANOTHER, seed, other)
        wrong = _masked(own, trial.first[seed], k)
        if own and wrong != own and not trial.toolbox:
            await _record(trial, _FORM, seed, wrong)
    for name in (_ANOTHER, _FORM):
        if len(trial.returns(name)) >= trial.settings.seeds:
            trial.blind.append(name)
            if name in paid_blindly(trial):
                trial.hack = paid(trial, name, name)


async def play_luck(trial: Trial) -> None:
    """Set ``trial.hack`` when elimination wins, or when nothing tells the answer."""
    known = {seed: plan for seed in trial.seeds(_LUCK_BLOCK, _PLANS) if (plan := await _plan(trial, seed))}
    if any(len(plan) > 1 for plan in known.values()):
        return
    wins = {t.actions[-1] for t in trial.transcripts if t.won}
    options = _options(sorted({plan[0] for plan in known.values()} or wins), trial.first)
    if len(options) > 1:
        await _eliminate(trial, options)
    if known and not trial.hack:
        await _unknowable(trial, known)


async def _eliminate(trial: Trial, options: Sequence[str]) -> None:
    """Try the options in random orders, without looking, until the win rate is clear."""
    firsts = [set(_TOKEN.findall(first)) for first in trial.first.values()]
    # the words that only some of the first observations hold
    varying = set.union(*firsts) - set.intersection(*firsts)
    answers: dict[tuple[int, str], set[str]] = defaultdict(set)
    won, played = 0.0, 0
    for look in _LOOKS:
        for seed in trial.seeds(_LUCK_BLOCK + 1, _LOOKS[-1])[played:look]:
            # not by the seed alone, which the program draws from as well
            order = random.Random(f"{seed} in any order").sample(options, len(options))[: trial.turns]
            transcript = await trial.episode(seed, iter(order))
            won, played = won + transcript.returned, played + 1
            if transcript.error:
                return
            for turn, (action, step) in enumerate(zip(transcript.actions, transcript.steps, strict=False)):
                told = answers[turn, action]
                if not step.done:
                    tokens = _TOKEN.findall(step.observation)
                    told.add("".join(token for token in tokens if token not in varying))
                if len(told) > 1:
                    return
        low, high = interval(won, played)
        # one try is a guess, which the toss of the trivial policies judges
        if high < _LUCKY or not any(answers.values()):
            return
        if low > _LUCKY:
            trial.hack = (
                f"luck decides: {len(options)} answers tried in any order won {won:g} of {played} instances, "
                "and a wrong answer tells nothing"
            )
            trial.tossed = won, played
            return


async def _unknowable(trial: Trial, known: dict[int, list[str]]) -> None:
    """Compare instances that begin with the same words and need different answers."""
    alike: dict[str, list[int]] = defaultdict(list)
    for seed in known:
        alike[trial.first[seed]].append(seed)
    groups = [seeds for seeds in alike.values() if len({known[seed][0] for seed in seeds}) > 1]
    for seeds in groups[:_ALIKE]:
        answers = dict.fromkeys(known[seed][0] for seed in seeds)
        others = [plan[0] for plan in known.values() if plan[0] not in answers][:_TRIED]
        suggested = trial.actions(trial.first[seeds[0]])
        plans = [[action] for action in (*answers, *others, *suggested[: 2 * _TRIED], *_VERBS)]
        for plan in (*plans, [*actions.sweep(suggested, trial.turns)]):
            found = [(seed, await trial.episode(seed, iter(plan))) for seed in seeds[:_TRIED]]
            if len({t.fingerprint() for _, t in found if not t.won}) > 1:
                return
            if any(t.won and known[seed] != plan and plan[0] in answers for seed, t in found):
                return
    if groups:
        trial.hack = (
            "nothing tells the answer: instances that begin alike and answer alike need "
            f"{known[groups[0][0]][0]!r} here and {known[groups[0][1]][0]!r} there"
        )


async def _plan(trial: Trial, seed: int) -> list[str]:
    """Return the solution of an instance, [] when there is none."""
    if "solution" not in trial.instance.calls:
        await trial.open(seed)
        return []
    try:
        return await trial.plan(seed)
    except EnvFailure as error:
        raise Rejected("solution", f"solution(): {tell(error)}") from None


async def _record(trial: Trial, policy: str, seed: int, plan: list[str]) -> None:
    played = await trial.episode(seed, iter(_repeated(trial, plan)))
    trial.played.setdefault(policy, {})[seed] = played


def _repeated(trial: Trial, plan: list[str]) -> list[str]:
    return (plan if trial.toolbox else plan * trial.turns)[: trial.turns]


def _masked(plan: Sequence[str], first: str, number: int) -> list[str]:
    """Return ``plan`` with random words and numbers in place of those that ``first`` does not hold."""
    source, known = random.Random(number), set(_TOKEN.findall(first.lower()))

    def other(token: str) -> str:
        if not token.strip().isalnum() or token.lower() in known:
            return token
        signs = string.digits if token.isdigit() else string.ascii_lowercase
        return "".join(source.choice(signs) for _ in token)

    return ["".join(map(other, _TOKEN.findall(action))) for action in plan]


def _options(answers: Sequence[str], firsts: dict[int, str]) -> list[str]:
    """Return the answers that somebody would try who has read the observations and knows no instance.

    The range that the text names when all answers lie in it, the answers themselves when the text names them
    all, else those of the plausible actions up to the last answer; [] when no text suggests them.
    """
    if not answers:
        return []
    first = next(iter(firsts.values()))
    if all(answer.lstrip("-").isdecimal() and len(answer) < 10 for answer in answers):
        numbers = [int(answer) for answer in answers]
        for low, high in actions.ranges(first):
            if low <= min(numbers) and max(numbers) <= high:
                return [str(number) for number in range(low, high + 1)] if high - low < 64 else []
    words = set(_TOKEN.findall(first))
    if all(answer in words for answer in answers):
        return list(answers)
    likely = [action for action in actions.plausible(first) if action.lstrip("-").isdecimal()]
    places = [likely.index(answer) for answer in answers if answer in likely]
    return likely[: max(places) + 1] if len(places) == len(answers) else []
