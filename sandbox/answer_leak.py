"""Detects winning actions that the first observation, or the answer to nonsense, gives away.

There are three ways: the observation is the action; it says that something *is the answer*; or it prints the
action at a place that can be found without understanding it (always after the same words). The last is
measured: the word at that place is played at once in fresh instances, and must win nearly all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sandbox import actions
from sandbox.errors import EnvError
from sandbox.probes import Transcript
from sandbox.trial import Trial

_WORD = re.compile(r"\w+|[^\w\s]")
_COMPARED, _PLACES, _FRESH, _BLOCK, _RATE = 4, 8, 8, 5, 0.9
_CONTEXT = 2
_LONGEST = 256  # of an action that is looked for in a text

Place = tuple[str, ...]


def said(observation: str, action: str) -> bool:
    """Return whether the observation is the action, or says outright that it is the answer."""
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


def places(observations: Sequence[str]) -> list[Place]:
    """Return the places that hold a word in every observation, and not always the same one.

    A place is known by the words before it.
    """
    first, *others = [dict(reversed([*_words(text)])) for text in observations]
    return [
        place
        for place, word in first.items()
        if all(place in words for words in others) and any(words[place] != word for words in others)
    ]


def copied(observation: str, place: Place) -> str | None:
    """Return the first word at ``place``, None when there is none."""
    return next((word for there, word in _words(observation) if there == place), None)


async def copy_wins(trial: Trial) -> str:
    """Return where a word stands that wins when it is copied, "" when there is none."""
    for before, where in (((), "the first observation"), ((actions.NONSENSE,), "the answer to nonsense")):
        if not trial.invalid.isdisjoint(before):
            continue
        seen = [await _seen(trial, seed, before) for seed in trial.seeds()[:_COMPARED]]
        texts = [text for text in seen if text is not None]
        for place in places(texts)[:_PLACES] if len(texts) > 1 else []:
            if await _always_wins(trial, before, place):
                return f"{where} gives the answer away: it is the word after {' '.join(place)!r}"
    return ""


async def _always_wins(trial: Trial, before: tuple[str, ...], place: Place) -> bool:
    """Return whether the word at ``place`` wins nearly all of fresh instances when it is played next."""
    won = 0
    for number, seed in enumerate(trial.seeds(_BLOCK, _FRESH)):
        seen = await _seen(trial, seed, before)
        word = None if seen is None else copied(seen, place)
        won += word is not None and await _wins_at_once(trial, word)
        if number + 1 - won > (1 - _RATE) * _FRESH:
            return False
    return True


async def _seen(trial: Trial, seed: int, before: tuple[str, ...]) -> str | None:
    """Return the observation after ``before``, None when the episode is over by then."""
    if not before:
        return await trial.open(seed)
    played = await trial.episode(seed, iter(before))
    return None if played.error or played.ended else played.steps[-1].observation


async def _wins_at_once(trial: Trial, action: str) -> bool:
    try:
        step = await trial.instance.step(action)
    except EnvError:
        return False
    return Transcript("", (action,), (step,)).won


def _words(observation: str) -> Iterator[tuple[Place, str]]:
    words = _WORD.findall(observation)
    for number, word in enumerate(words):
        before = words[max(0, number - _CONTEXT) : number]
        if before and re.match(r"\w", word):
            yield tuple("#" if part.isdecimal() else part.lower() for part in before), word
