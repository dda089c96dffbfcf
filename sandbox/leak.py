"""Whether the first observation gives the winning action away.

Three ways: the observation is the action; it says that something *is the answer*; or it prints the
action at a place that can be found without understanding it (always after the same words). The last is
measured: the word at that place is played first in fresh instances, and must win nearly all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from sandbox.climb import Climb
from sandbox.errors import EnvError
from sandbox.probes import Transcript

_WORD = re.compile(r"\w+|[^\w\s]")
_LEAST, _FRESH, _BLOCK, _RATE = 3, 8, 5, 0.9
_CONTEXT = 2
_LONGEST = 256  # of an action that is looked for in a text

Place = tuple[str, ...]


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
    """Return the place from which a copied word wins as first action, "" when there is none."""
    by_seed: dict[int, tuple[str, str]] = {}
    for name, transcripts in climb.played.items():
        for seed, transcript in transcripts.items():
            if transcript.won and (len(transcript.actions) == 1 or name == "solution"):
                by_seed.setdefault(seed, (transcript.first, transcript.actions[-1]))
    for place in suspects(by_seed.values())[:3]:
        won = 0
        for seed in climb.seeds(_BLOCK, _FRESH):
            word = copied(await climb.open(seed), place)
            if word is not None:
                won += await _wins_at_once(climb, word)
        if won >= _RATE * _FRESH:
            return " ".join(place)
    return ""


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
