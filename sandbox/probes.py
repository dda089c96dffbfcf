"""Playing a program without a model: transcripts, plausible actions, policies that do not look."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from sandbox.errors import EnvError
from sandbox.frames import StepResult

if TYPE_CHECKING:
    from sandbox.instance import Instance

# What int(), indexing and look-ups raise on text that is not an action.
INVALID_ACTION = frozenset(("ValueError", "TypeError", "IndexError", "KeyError"))
GARBAGE = ("banana", "", "-1", "999999999", "\\boxed{1}")

_NUMBER = re.compile(r"-?\d+")
_RANGE = re.compile(r"(-?\d+)\s*(?:\.\.+|\u2013|-|to|and)\s*(-?\d+)")
_WORD = re.compile(r"[^\W\d_]{1,24}")
_MAX_SPAN, _MAX_EACH, _MAX_ACTIONS = 40, 12, 64


class Transcript(msgspec.Struct, frozen=True):
    """What happened from a first observation on.

    ``error`` is the exception that ended it, if one did, with its type and the phase it came from
    (``contract`` when the program's answer was at fault).
    """

    first: str
    actions: tuple[str, ...]
    steps: tuple[StepResult, ...]
    error: str = ""
    error_type: str = ""
    phase: str = ""

    @property
    def ended(self) -> bool:
        """Whether the program itself ended the episode."""
        return bool(self.steps) and self.steps[-1].done

    @property
    def won(self) -> bool:
        """Whether the episode terminated with a positive return."""
        return bool(self.steps) and self.steps[-1].terminated and self.steps[-1].reward > 0 and not self.error

    def fingerprint(self) -> bytes:
        """Bytes that are equal for equal transcripts."""
        return msgspec.json.encode(self)


async def play(instance: Instance, first: str, actions: Iterator[str]) -> Transcript:
    """Step through ``actions`` until the episode ends, the program raises, or they run out.

    Raises the terminal errors of the package.
    """
    taken: list[str] = []
    steps: list[StepResult] = []
    for action in actions:
        taken.append(action)
        try:
            steps.append(await instance.step(action))
        except EnvError as error:
            return Transcript(first, tuple(taken), tuple(steps), str(error), error.type, error.phase)
        if steps[-1].done:
            break
    return Transcript(first, tuple(taken), tuple(steps))


def plausible(observation: str) -> tuple[str, ...]:
    """Return at most 64 actions that the text suggests: its ranges, numbers and words, then small numbers."""
    found: list[str] = []
    for low, high in ((int(a), int(b)) for a, b in _RANGE.findall(observation)):
        if 0 < high - low <= _MAX_SPAN:
            found += map(str, range(low, high + 1))
    found += [number for number in _NUMBER.findall(observation) if len(number) <= 6][:_MAX_EACH]
    found += list(dict.fromkeys(_WORD.findall(observation)))[:_MAX_EACH]
    found += map(str, range(10))
    return tuple(dict.fromkeys(found))[:_MAX_ACTIONS]


def constant(_: Sequence[str], turns: int, action: str) -> Iterator[str]:
    """Always the same action, whatever is plausible."""
    return iter([action] * turns)


def sweep(actions: Sequence[str], turns: int, start: int = 0) -> Iterator[str]:
    """The actions in order, beginning with number ``start``, over and over."""
    return (actions[(start + i) % len(actions)] for i in range(turns))


def guess(actions: Sequence[str], turns: int, seed: int) -> Iterator[str]:
    """Actions drawn at random, without looking at what comes back."""
    source = random.Random(seed)
    return (source.choice(actions) for _ in range(turns))
