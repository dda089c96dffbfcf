"""Undoes the spellings in which a hint may disguise an action. Pure.

The designer's check of hints and the agent's check of leaks compare texts in this form.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from bus.messages import Turn

_UNITS = (
    *("zero", "", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# "one" is seldom a number: the one that is meant.
_NUMERALS = {word: number for number, word in enumerate(_UNITS) if word}
_NUMERALS |= {word: 10 * number for number, word in enumerate(_TENS, 2)}
_NUMERALS |= {
    f"{ten}{joint}{unit}": 10 * number + count
    for number, ten in enumerate(_TENS, 2)
    for count, unit in enumerate(("one", *_UNITS[2:10]), 1)
    for joint in " -"
}
_NUMERAL = re.compile(
    rf"\b({'|'.join(sorted(map(re.escape, _NUMERALS), key=len, reverse=True))})\b", re.IGNORECASE
)
# With commas between them, letters are a list.
_SPELT = re.compile(r"(?<![^\W_])[^\W\d_]([ ._-])[^\W\d_](?:\1[^\W\d_])+(?![^\W_])")
_WORD = re.compile(r"-?\d+(?:\.\d+)?|[^\W\d_]+")
_LEADING = re.compile(r"(?<![\w.])0+(?=\d)")


def plain(text: str) -> str:
    """Return ``text`` in plain spelling.

    Wide letters and digits become usual ones, invisible signs go, numbers are in digits (*one* stays, which
    is seldom a number), and words that were spelt letter by letter are joined.
    """
    seen = (sign for sign in unicodedata.normalize("NFKC", text) if unicodedata.category(sign) != "Cf")
    joined = _SPELT.sub(lambda found: found[0].replace(found[1], ""), "".join(seen))
    digits = _NUMERAL.sub(lambda found: str(_NUMERALS[found[0].lower()]), joined)
    return _LEADING.sub("", digits)


def hint_names_action(hint: str | None, transcript: Sequence[Turn]) -> bool:
    """Return whether a play was over after one action that stands in ``hint``, as written or normalised.

    An action that the observation names as well is a choice that every player was offered, and no secret.
    """
    if hint is None or len(transcript) != 1:
        return False
    (turn,) = transcript
    return any(
        _names(_words(read(hint)), _words(read(turn.action)), _words(read(turn.observation)))
        for read in (str, plain)
    )


def _names(hint: Sequence[str], action: Sequence[str], observation: Sequence[str]) -> bool:
    return bool(action) and within(action, hint) and not within(action, observation)


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def within(part: Sequence[str], whole: Sequence[str]) -> bool:
    """Return whether ``whole`` holds ``part``, one word after the other."""
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))
