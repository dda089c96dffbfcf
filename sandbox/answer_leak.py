"""Whether the winning action is given away, by the first observation or by the answer to nonsense.

Three ways: the observation is the action; it says that something *is the answer*; or it prints the
action at a place that can be found without understanding it (always after the same words). The last is
measured: the word at that place is played at once in fresh instances, and must win nearly all of them.
What says of itself that it is the answer is such a place as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from sandbox import probes
from sandbox.errors import EnvError
from sandbox.probes import Transcript
from sandbox.validation_context import Climb

_WORD = re.compile(r"\w+|[^\w\s]")
_CLAIM = re.compile(
    r"\b(?:answer|solution|secret|key|target|password|code|word|number)\b\W{0,3}(?:is|was|are|=|:)\W{0,3}(\w{1,64})",
    re.IGNORECASE,
)
_LEAST, _FRESH, _BLOCK, _RATE, _PAIRS = 3, 8, 5, 0.9, 8
_CONTEXT = 2
_LONGEST = 256  # of an action that is looked for in a text

Place = tuple[str, ...]
CLAIM: Place = ("the answer is",)


def said(observation: str, action: str) -> bool:
    """Whether the observation is the action, or says outright that it is the answer."""
    if not action:
        return False
    if observation.strip() == action:
        return True
    if len(action) > _LONGEST:
        return False
    # "answer: yes or no" only lists what there is
    end = r"(?!\w|\W{0,3}\bor\b|\s*[,/|])"
    claim = rf"\b(answer|solution|secret|key|target)\b\W{{0,3}}(is|are|=|:)\W{{0,3}}{re.escape(action)}{end}"
    return re.search(claim, observation, re.IGNORECASE) is not None


def places(observation: str, action: str) -> frozenset[Place]:
    """The places, told by the words before them, at which ``observation`` holds the word ``action``."""
    return frozenset(place for place, word in _words(observation) if word == action)


def copied(observation: str, place: Place) -> str | None:
    """The first word at ``place``, None when there is none."""
    if place == CLAIM:
        claim = _CLAIM.search(observation)
        return claim[1] if claim else None
    return next((word for there, word in _words(observation) if there == place), None)


def suspects(wins: Iterable[tuple[str, str]]) -> list[Place]:
    """Places that hold the winning action in every (observation, action) of at least three.

    One action that always wins is no copy, so at least two different ones are needed.
    """
    pairs = list(wins)
    if len(pairs) < _LEAST or len({action for _, action in pairs}) < 2:
        return []
    counts = Counter(place for pair in pairs for place in places(*pair))
    return [place for place, count in counts.items() if count == len(pairs)]


async def copy_wins(climb: Climb) -> str:
    """Say where a word stands that wins when it is copied, "" when there is none."""
    for before, where in (((), "the first observation"), ((probes.NONSENSE,), "the answer to nonsense")):
        if climb.invalid.isdisjoint(before):
            for place in await _suspected(climb, before):
                if await _always_wins(climb, before, place):
                    how = (
                        "it says what it is"
                        if place == CLAIM
                        else f"it is the word after {' '.join(place)!r}"
                    )
                    return f"{where} gives the answer away: {how}"
    return ""


async def _suspected(climb: Climb, before: tuple[str, ...]) -> list[Place]:
    """The places that held what won, in what is seen after ``before``."""
    by_seed: dict[int, tuple[str, str]] = {}
    for name, transcripts in climb.played.items():
        for seed, transcript in transcripts.items():
            alone = before or len(transcript.actions) == 1 or name == "solution"
            if transcript.won and alone and _WORD.fullmatch(transcript.actions[-1]):
                by_seed.setdefault(seed, (transcript.first, transcript.actions[-1]))
    if not before:
        return [*suspects(by_seed.values())[:3], *_claimed(climb.first.values())]
    pairs = []
    if len(by_seed) >= _LEAST:
        for seed, (_, action) in list(by_seed.items())[:_PAIRS]:
            pairs.append((await _seen(climb, seed, before) or "", action))
    seen = await _seen(climb, climb.seeds()[0], before)
    return [*suspects(pairs)[:3], *_claimed([seen or ""])]


def _claimed(texts: Iterable[str]) -> list[Place]:
    return [CLAIM] if all(copied(text, CLAIM) is not None for text in texts) else []


async def _always_wins(climb: Climb, before: tuple[str, ...], place: Place) -> bool:
    """Whether the word at ``place`` wins nearly all of fresh instances when it is played next."""
    won = 0
    for number, seed in enumerate(climb.seeds(_BLOCK, _FRESH)):
        seen = await _seen(climb, seed, before)
        word = None if seen is None else copied(seen, place)
        won += word is not None and await _wins_at_once(climb, word)
        if number + 1 - won > (1 - _RATE) * _FRESH:
            return False
    return True


async def _seen(climb: Climb, seed: int, before: tuple[str, ...]) -> str | None:
    """What is seen after ``before``; None when the episode is over by then."""
    if not before:
        return await climb.open(seed)
    played = await climb.episode(seed, iter(before))
    return None if played.error or played.ended else played.steps[-1].observation


async def _wins_at_once(climb: Climb, action: str) -> bool:
    try:
        step = await climb.instance.step(action)
    except EnvError:
        return False
    return Transcript("", (action,), (step,)).won


def _words(observation: str) -> Iterator[tuple[Place, str]]:
    words = _WORD.findall(observation)
    for number, word in enumerate(words):
        before = words[max(0, number - _CONTEXT) : number]
        if before and re.match(r"\w", word):
            yield tuple("#" if part.isdecimal() else part.lower() for part in before), word
