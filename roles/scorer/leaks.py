"""Hints that hold the answer. Pure.

A hint should make a game easier, not play it. The designer refuses hints that name what it saw win
(``roles.designer.hint``); this looks at what the hinted plays then did.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from bus.messages import Turn
from roles.scorer.state import Play, Status
from roles.text_normalise import plain

NEARLY_ALL = 0.9
_FEWEST = 2
_WORD = re.compile(r"-?\d+(?:\.\d+)?|[^\W\d_]+")


def told(hint: str | None, transcript: Sequence[Turn]) -> bool:
    """Whether a play was over after one action that stands in ``hint``, word for word, as it is written or as
    :func:`roles.text_normalise.plain` reads it.

    An action that the observation names as well is a choice that every player was offered, and no secret.
    """
    if hint is None or len(transcript) != 1:
        return False
    (turn,) = transcript
    return any(
        _told(_words(read(hint)), _words(read(turn.action)), _words(read(turn.observation)))
        for read in (str, plain)
    )


def _told(hint: Sequence[str], action: Sequence[str], observation: Sequence[str]) -> bool:
    return bool(action) and _within(action, hint) and not _within(action, observation)


def leaks(hinted: Sequence[Play]) -> bool:
    """Whether nearly all of at least two hinted plays were won at once by what their hint said."""
    done = [play for play in hinted if play.status is Status.DONE]
    if len(done) < _FEWEST:
        return False
    least = NEARLY_ALL * len(done)
    return sum(play.returned for play in done) >= least and sum(play.told for play in done) >= least


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def _within(part: Sequence[str], whole: Sequence[str]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))
