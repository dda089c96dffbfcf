"""What an observation claims in numbers and words, read with care: what is ambiguous is not claimed. Pure."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

_NUMERALS = {
    word: number
    for number, word in enumerate(
        [
            *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
            *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
            *("nineteen", "twenty"),
        ],
        1,
    )
}
_COUNT = rf"(\d{{1,3}}|{'|'.join(_NUMERALS)})"
_NOUNS = "tries|guesses|attempts|chances|turns|moves"
_LEFT = "left|remaining|allowed"
_TRIES = re.compile(rf"\b{_COUNT}\s+(?:[a-z]+\s+)?({_NOUNS})\b", re.IGNORECASE)
# A bare "attempts: 3" may count those that were made.
_TRIES_AFTER = re.compile(
    rf"\b(?:(?:max|maximum|{_LEFT})\s+({_NOUNS})|({_NOUNS})\s+(?:{_LEFT}))\s*[:=]\s*([1-9]\d{{0,2}})(?![\d/])",
    re.IGNORECASE,
)
_TIMES = re.compile(rf"\b(?:guess|try|answer)\s+(?:up\s+to|at\s+most)\s+{_COUNT}\s+times\b", re.IGNORECASE)
_SHARED = re.compile(
    rf"\b(?:{_NOUNS}|times|\d+)\s+(?:(?:for|in|on|at)\s+)?(?:per|each|every|an?)\b", re.IGNORECASE
)
_RANGES = (
    re.compile(r"(?<![\w.-])(-?\d{1,6})\s*\.\.+\s*(-?\d{1,6})(?![\w.])"),
    re.compile(r"(?<![\w.-])(-?\d{1,6})\s+(?:to|through)\s+(-?\d{1,6})\b", re.IGNORECASE),
    re.compile(r"\bbetween\s+(-?\d{1,6})\s+and\s+(-?\d{1,6})\b", re.IGNORECASE),
    re.compile(r"(?<![\w.-])(\d{1,6})\s*[-\u2013]\s*(\d{1,6})(?![\w.-])"),
)
# What is asked for is made of several numbers: the range is that of the parts.
_OF_PARTS = re.compile(
    r"\b(?:sums?|total|products?|differences?|average|mean|median|add|plus|minus|multipl\w+|divi\w+|squares?"
    r"|powers?|digits?|codes?|sequences?|combinations?|pairs?|both|together)\b",
    re.IGNORECASE,
)
_ASKED = re.compile(
    r"\b(?:find|guess|name|choose|pick|say|numbers?|integer|value|hides?|hidden)\b[^.;:?!\d]*$", re.IGNORECASE
)
_NEAR = 40
_GOAL = re.compile(
    r"\b(?:reach|collect|score|gather|earn|save|make|get)\s+(?:exactly\s+|at least\s+)?"
    r"(\d{1,5})\s+([a-z]{3,})\b",
    re.IGNORECASE,
)
_WON = re.compile(
    r"\byou (?:have )?w[io]n\b|\bcongratulations\b|\bwell done\b|\bvictory\b|\bsolved\b"
    r"|^\W*(?:correct|success)\b(?!\s+\w+\s+(?:was|is|would|were))",
    re.IGNORECASE,
)
_DOUBT_OF_VICTORY = re.compile(
    r"\bwrong\b|\bincorrect\b|\blos[te]\b|\bover\b|\bfail|\bno\b|\bnot\b|n't\b|\bout of\b|\bunsolved\b"
    r"|\bagain\b",
    re.IGNORECASE,
)
_LOST = re.compile(r"\byou (?:have )?los[te]\b|\bgame over\b|\bwrong\b|\bincorrect\b", re.IGNORECASE)
_DOUBT_OF_DEFEAT = re.compile(
    r"\bw[io]n|\bcorrect\b|\bsolved\b|\bsuccess|\byes\b|\bright\b|\breached\b|\bfound\b|\bnot\b|\bno\b",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"\binvalid|\bunknown\b|\bunrecogni|\bunderst(?:and|ood)|\bmust be\b|\bplease\b|\bformat\b|\billegal\b"
    r"|\bnot (?:a |an )?(?:valid|allowed|possible|number|legal|move)|\bdoes(?:n't| not) count|\bignored\b",
    re.IGNORECASE,
)
_FAILURES = re.compile(
    r"\b(?:life|lives|hearts?|health|wrong|mistakes?|strikes?|errors?|misses|failures?|faults?|penalt(?:y|ies))\b",
    re.IGNORECASE,
)
_LETTERS = re.compile(r"[^\W\d_]+")

_OFTEN = 4
_SHARE = 0.25
_LONG = 4


class Tries(NamedTuple):
    """``number`` actions, called ``noun``. A ``strict`` noun counts failures: none of them ends a game."""

    number: int
    noun: str

    @property
    def strict(self) -> bool:
        return self.noun in ("tries", "guesses", "attempts", "chances")


def tries(observation: str) -> Tries | None:
    """Return how many actions the text allows in all; None when it says nothing, two different numbers, or
    how many for each of something.
    """
    if _SHARED.search(observation):
        return None
    found = {(_number(count), noun.lower()) for count, noun in _TRIES.findall(observation)}
    found |= {(int(count), (one or other).lower()) for one, other, count in _TRIES_AFTER.findall(observation)}
    found |= {(_number(count), "tries") for count in _TIMES.findall(observation)}
    if len({number for number, _ in found}) != 1:
        return None
    return Tries(*max(found, key=lambda claim: Tries(*claim).strict))


def span(observation: str) -> tuple[int, int] | None:
    """Return the only range of numbers in the text, both ends included; None without or with several."""
    found = {
        (int(low), int(high))
        for form in _RANGES
        for low, high in form.findall(observation)
        if int(low) < int(high)
    }
    return found.pop() if len(found) == 1 else None


def answers(observation: str) -> tuple[int, int] | None:
    """Return the range in which the text says that the answer lies; None where it may be that of parts from
    which the answer is made.
    """
    return None if _OF_PARTS.search(observation) else span(observation)


def asked(observation: str) -> bool:
    """Whether a range in the text follows what is asked for (*guess a number from 1 to 9*), so that it can be
    that of nothing else.
    """
    found = (match.start() for form in _RANGES for match in form.finditer(observation))
    return any(_ASKED.search(observation[max(0, start - _NEAR) : start]) for start in found)


class Goal(NamedTuple):
    """``number`` of ``noun`` wins."""

    number: int
    noun: str


def goal(observation: str) -> Goal | None:
    """Return the number of things to reach; None when the text names none, or several."""
    found = {(int(number), noun.lower()) for number, noun in _GOAL.findall(observation)}
    return Goal(*found.pop()) if len(found) == 1 else None


def count(observation: str, noun: str) -> int | None:
    """Return the number that the text gives of ``noun``; None when it gives none, or several."""
    found = {int(number) for number in re.findall(rf"\b(\d{{1,5}})\s+{noun}\b", observation, re.IGNORECASE)}
    return found.pop() if len(found) == 1 else None


def says_won(observation: str) -> bool:
    """Whether the text says that the game is won, and nothing that could mean the contrary."""
    return bool(_WON.search(observation)) and not _DOUBT_OF_VICTORY.search(observation)


def says_lost(observation: str) -> bool:
    """Whether the text says that the game is lost, and nothing that could mean the contrary."""
    return bool(_LOST.search(observation)) and not _DOUBT_OF_DEFEAT.search(observation)


def refuses(observation: str) -> bool:
    """Whether the text may mean that the action did not count."""
    return bool(_REFUSED.search(observation))


def limits_failures(observation: str) -> bool:
    """Whether the text may mean that failures end the game, whatever number of actions it allows."""
    return bool(_FAILURES.search(observation))


def garbled(observation: str) -> str:
    """Say how the text is garbled, "" when it is not.

    Two signs, both of texts that were joined wrongly: a line holds the same list of words twice, once with
    another word between all of them, or the letters of a word are each glued to the same other word.
    """
    for line in observation.splitlines():
        words = [word.lower() for word in _LETTERS.findall(line)]
        for word, count in Counter(word for word in words if len(word) >= _LONG).items():
            if count >= _OFTEN and _separates(words, word):
                return f"{word!r} stands between the words of a list, which follows once more"
        endings = Counter(word[1:] for word in set(words) if len(word) > _LONG)
        rest, glued = max(endings.items(), key=lambda item: item[1], default=("", 0))
        if glued >= _OFTEN and glued >= _SHARE * len(words):
            return f"letters are glued to {rest!r}"
    return ""


def _separates(words: list[str], word: str) -> bool:
    """Whether ``word`` comes after every word or two of a list that is also there without it."""
    places = [place for place, other in enumerate(words) if other == word]
    if not all(1 < after - before <= 3 for before, after in pairwise(places)):
        return False
    between = [other for other in words[places[0] : places[-1]] if other != word]
    return any(words[at : at + len(between)] == between for at in range(len(words)))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else _NUMERALS[text.lower()]
