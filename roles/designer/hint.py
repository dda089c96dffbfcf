"""The privileged hint: written in a call of its own, on the accepted program (reference spec 2.7)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from bus.messages import WaysToWin
from engine.inference.replies import visible_reply
from roles.text_normalise import plain, within
from roles.work_loop import sampling_seed

if TYPE_CHECKING:
    from roles.designer.authors import Author
    from roles.designer.prompt import PromptWriter

LONGEST_HINT = 800
_NO_ADVICE = ("\\boxed", "```")
_LABEL = re.compile(r"^\s*hint\s*:\s*", re.IGNORECASE)
_WORD = re.compile(r"-?\d+|[^\W\d_]+")
_CLAIM = r"\b(answer|solution|secret|key|target|number|word)\b\W{0,3}(is|are|=|:)\W{0,3}"
_FILLERS = frozenset(("then", "and", "next", "after", "that", "to", "finally", "first", "last", "now"))
_STOP = frozenset(
    word
    for line in (
        "a an and are as at be by can do each every first for from get go has have if in into is it its make",
        "must not of on once one or play player put so take than that the their then there they this to try",
        "up use what when which will with you your",
    )
    for word in line.split()
)
_INSTANCES, _NEARLY_ALL = 3, 0.9
_REPHRASED = 0.5
# So many words in the order of an action are no chance.
_LONG_ACTION = 3
# So many letters of an action, written as one word, are no chance.
_LONG_WORD = 8

Words = tuple[str, ...]


def clean_hint(text: str, finish: str, *, thought_open: bool = False) -> str | None:
    r"""Return the hint in a reply as one line, None when it is not acceptable.

    Refused are a reply that was cut, an empty one, one longer than LONGEST_HINT characters, and one with
    a ``\boxed`` group, which would be an action and not advice, a block of code, or signs that cannot be
    shown. Reasoning is not part of the hint (``visible_reply``, which explains ``thought_open``).
    """
    if finish != "stop":
        return None
    line = _LABEL.sub("", " ".join(visible_reply(text, thought_open=thought_open).split()))
    if not line or len(line) > LONGEST_HINT:
        return None
    return None if any(sign in line for sign in _NO_ADVICE) or not line.isprintable() else line


def gives_away(hint: str, wins: WaysToWin) -> str:
    """Return how ``hint`` names the winning action, "" when it does not.

    It does when it says that the answer is one; when it holds a whole solution of several actions in order;
    when it holds the action that wins nearly all instances; or when the only thing in it that could be an
    action wins at once, a short action in two instances. A hint that names several candidates is advice.
    Actions and hint are compared as words, as they are written and as
    :func:`roles.text_normalise.plain` reads them.
    """
    if found := _tells(hint, wins):
        return found
    spelt_plainly = msgspec.structs.replace(
        wins,
        alone=tuple(map(plain, wins.alone)),
        plans=tuple(tuple(map(plain, plan)) for plan in wins.plans),
        actions=tuple(map(plain, wins.actions)),
    )
    return _tells(plain(hint), spelt_plainly)


def _tells(hint: str, known: WaysToWin) -> str:
    wins = Counter(_words(action) for action in known.alone if _words(action))
    for action in wins:
        spelt = r"\W*".join(map(re.escape, action))
        if re.search(rf"{_CLAIM}{spelt}(?!\w)", hint, re.IGNORECASE):
            return f"it says that {' '.join(action)!r} is the answer"
    said = _words(hint)
    for plan in known.plans:
        steps = _without_fillers(tuple(word for action in plan for word in _words(action)))
        if len(steps) > 1 and within(steps, _without_fillers(said)):
            return "it holds a whole solution"
    often = max(_INSTANCES, _NEARLY_ALL * known.instances)
    for action, times in wins.items():
        if len(wins) == 1 and times >= often and _names(said, action):
            return f"{' '.join(action)!r} always wins"
    named = _named(said, wins, known.actions)
    if len(named) == 1 and wins[named[0]] >= (1 if len(named[0]) >= _LONG_ACTION else 2):
        return f"{' '.join(named[0])!r} wins at once"
    return ""


def _named(said: Words, wins: Counter[Words], taken: Sequence[str]) -> list[Words]:
    """Return the parts of a hint that could be an action.

    They are all numbers where numbers win, else the longest of the actions that were seen.
    """
    if wins and all(len(action) == 1 and _is_number(action[0]) for action in wins):
        return [(number,) for number in dict.fromkeys(filter(_is_number, said))]
    known = {*wins, *(_words(action) for action in taken if _words(action))}
    named = [action for action in sorted(known) if _names(said, action)]
    return [one for one in named if not any(one != other and within(one, other) for other in named)]


def _names(said: Words, action: Words) -> bool:
    """Return whether a hint holds an action, with or without the fillers of both."""
    if within(action, said) or (len("".join(action)) >= _LONG_WORD and "".join(action) in said):
        return True
    bare = _without_fillers(action)
    return len(bare) > 1 and within(bare, _without_fillers(said))


def adds_nothing(hint: str, firsts: Sequence[str]) -> bool:
    """Return whether every first observation holds what ``hint`` tells.

    All content words must be there. Of a sentence, half of the neighbouring pairs must be as well, of a bare
    list (of numbers, of names) all of them: a new order of known words tells something.
    """
    said = [word for word in _words(hint) if word not in _STOP]
    if not firsts or not said:
        return not said
    pairs = set(pairwise(said))
    sentence = len(said) < len(_words(hint))
    for first in firsts:
        words = [word for word in _words(first) if word not in _STOP]
        known = len(pairs & set(pairwise(words)))
        if not set(said) <= set(words) or known < len(pairs) * (_REPHRASED if sentence else 1.0):
            return False
    return True


def fault_of(hint: str, wins: WaysToWin) -> str:
    """Return the name of what is wrong with a hint, "" for nothing."""
    if gives_away(hint, wins):
        return "gives_away"
    return "adds_nothing" if wins.firsts and adds_nothing(hint, wins.firsts) else ""


class HintWriter:
    """Asks ``author`` for a hint, up to ``attempts`` times: the current policy, or an external model."""

    def __init__(self, author: Author, prompts: PromptWriter, attempts: int) -> None:
        self._author, self._prompts, self._attempts = author, prompts, attempts
        self._counts: Counter[str] = Counter()

    async def write(
        self,
        source: str,
        *,
        design: str,
        attempt: int,
        wins: WaysToWin = WaysToWin(),  # noqa: B008 - frozen
    ) -> str | None:
        """Return a hint for ``source`` that is acceptable for its ``wins``, or None.

        None, too, when the program leaves no room for it or the author refuses. Raises InferenceUnavailable.
        """
        prompt = self._prompts.hint(source)
        if prompt is None:
            self._counts["hint_no_room"] += 1
            return None
        for trial in range(self._attempts):
            seed = sampling_seed(design, attempt, "hint", trial)
            reply = await self._author.write(prompt, seed=seed, key=design)
            if reply.refusal:
                self._counts["hint_refused"] += 1
                return None
            hint = clean_hint(reply.text, reply.finish, thought_open=reply.thought_open)
            fault = "malformed" if hint is None else fault_of(hint, wins)
            if hint is not None and not fault:
                return hint
            self._counts[f"hint_{fault}"] += 1
        return None

    def statistics(self) -> dict[str, float]:
        """Counts of refused hints by what was wrong with them."""
        return dict(self._counts)


def _without_fillers(words: Words) -> Words:
    return tuple(word for word in words if word not in _FILLERS)


def _words(text: str) -> Words:
    return tuple(word.lower() for word in _WORD.findall(text))


def _is_number(word: str) -> bool:
    return word.lstrip("-").isdecimal()
