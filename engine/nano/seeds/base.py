"""The base of a seed family: a parametrised program, its documents, its hint and its scripted players.

A family is one class in one file. Its program is a text with ``$name`` slots; the same text, read
backwards, recognises programs of the family (``parse``), so text and code cannot drift apart: a program is
a member only if writing it again from the parameters that were read gives the same text.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property
from random import Random
from typing import ClassVar

Parameters = Mapping[str, int | str]
Script = Generator[str, str, None]

LEVELS = (1, 2, 3, 4, 5, 6)
MAX_TURNS = 6
NOUNS = (
    "kites", "boats", "lamps", "wheels", "crates", "bells", "birds", "cards", "coins", "drums", "eggs",
    "flags", "gears", "horses", "jars", "knots", "leaves", "maps", "nails", "ovens", "pears", "quilts",
    "ropes", "sails", "tents", "urns", "vines", "wagons", "yarns", "bricks", "candles", "doors",
    "engines", "flutes", "goats", "hats", "islands", "jewels",
)  # fmt: skip
"""The things that the seed documents are about."""

# For levels 1-5 the least ratio of tries to places: the win rate of a player that tries one after another.
_COVERED = (0.99, 0.57, 0.42, 0.26, 0.20)

# The probability that a player without thought repeats its last answer.
_STUBBORN = 0.7

# A number, or an expression that stands for one.
_NUMBER = re.compile(r"\{[^{}]*\}|\b[A-Z]\b|\d+")
_SLOT = re.compile(r"\$([a-z]+)")

# In a program: the expression for its number of tries, and the names of slots that it uses.
_TRIES = re.compile(r"\bT=([^;\n]+)")
_NAMED_SLOT = re.compile(r"\b([A-Z])=\$([a-z]+)")


def boxed(thought: str, action: object) -> str:
    """Return a reply: the thought, if any, then the action in a box."""
    box = f"\\boxed{{{action}}}"
    return f"{thought} {box}" if thought else box


def stubborn(choose: Callable[[], object], rng: Random) -> Script:
    """Answer without thought, whatever the observation is, and mostly repeat the last answer."""
    action = choose()
    while True:
        yield boxed("", action)
        if rng.random() > _STUBBORN:
            action = choose()


def numbers(text: str) -> list[int]:
    """Return the integers in ``text``, in order."""
    return [int(found) for found in re.findall(r"\d+", text)]


def within(parameters: Parameters) -> Parameters:
    """Return parameters with ``base``, ``end`` and ``top``; ValueError unless 0 <= base <= end <= top."""
    if not int(parameters["base"]) <= int(parameters["end"]) <= int(parameters["top"]):
        raise ValueError("what is hidden lies outside of what is shown")
    return parameters


def count(pairs: Sequence[tuple[int, int]]) -> str:
    """Write a count of (left, right) in step, right first: ``13:1 14:2 15:3``.

    Small policies count reliably and add badly. The left number comes last in its pair, because that is
    where the policy must see that it has reached the number it counts to.
    """
    return " ".join(f"{right}:{left}" for left, right in pairs)


class Family(ABC):
    """One kind of seed environment.

    ``template`` is the program with ``$slots``; ``slots`` lists, in order, the ones ``parse`` reads (the
    others are derived in ``fill``). ``documents`` are texts with a ``{noun}``: the noun goes into the
    observation, so the document is needed to write the program that is expected.
    With ``tools`` its programs are tool environments, and players are sent their messages.
    Levels run from 1 (easy) to 6, by how little a naive player wins; a player that thinks wins all of them.
    So a level asks for skill, not for luck: a program computes its tries from its size, and gives as many as
    a thinking player needs. Games of luck would keep a win rate of one half without teaching anything. The
    warm start never sees withheld parameters; each level of ``seed_levels`` has others, too, and each of
    ``held_levels`` has withheld ones.
    """

    name: ClassVar[str]
    skill: ClassVar[str]
    template: ClassVar[str]
    slots: ClassVar[tuple[str, ...]]
    documents: ClassVar[tuple[str, ...]]
    max_turns: ClassVar[int] = MAX_TURNS
    seed_levels: ClassVar[tuple[int, ...]] = LEVELS
    held_levels: ClassVar[tuple[int, ...]] = LEVELS
    tools: ClassVar[bool] = False

    @abstractmethod
    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        """Return parameters of ``level``: withheld ones, or ones the warm start may see."""

    @abstractmethod
    def level(self, parameters: Parameters) -> int:
        """Return the level of any readable parameters, 1-6: what the classifier reports."""

    @abstractmethod
    def withheld(self, parameters: Parameters) -> bool:
        """Return whether the warm start must never see a program with these parameters."""

    @abstractmethod
    def hint(self, parameters: Parameters) -> str:
        """Return one line that tells what the observation does not."""

    @abstractmethod
    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        """Play well and show the work: yields replies, is sent observations."""

    def naive(self, observation: str, rng: Random) -> Script:
        """Play by a simple rule that is enough at level 1: here, one number after another."""
        for action in itertools.count():
            yield boxed("next", action)

    @abstractmethod
    def blurt(self, observation: str, rng: Random) -> Script:
        """Play without thought: plausible, blind answers."""

    def fill(self, parameters: Parameters) -> Mapping[str, object]:
        """Return the values of all slots; override to derive some from others."""
        return parameters

    def program(self, parameters: Parameters, noun: str) -> str:
        """Return the source text for ``parameters`` about ``noun``."""
        return "".join(text for text, _ in self.pieces(parameters, noun))

    def pieces(self, parameters: Parameters, noun: str) -> Iterator[tuple[str, bool]]:
        """Yield the program piece by piece, each with whether it fills a slot (else it is boilerplate)."""
        values = {**self.fill(parameters), "noun": noun}
        for index, piece in enumerate(_SLOT.split(self.template.strip("\n"))):
            yield (str(values[piece]), True) if index % 2 else (piece, False)

    def tries(self, parameters: Parameters) -> int:
        """Return after how many actions the program ends: the value of its own expression for ``T``."""
        found = _TRIES.search(self.template)
        assert found is not None, f"the template of {self.name} defines no T"
        slots = {name: parameters[slot] for name, slot in _NAMED_SLOT.findall(self.template)}
        return int(eval(found[1], dict(slots)))

    def parse(self, source: str) -> tuple[Parameters, str] | None:
        """Return (parameters, noun) of a member of this family, else None.

        A program whose text and code disagree is not a member.
        """
        found = self._pattern.fullmatch(source.strip())
        if found is None:
            return None
        read: dict[str, int | str] = {
            slot: int(text) if (text := found[slot]).isdecimal() else text for slot in self.slots
        }
        try:
            same = self.program(read, found["noun"]) == source.strip()
        except (ArithmeticError, LookupError, ValueError):
            return None
        return (read, found["noun"]) if same else None

    def resembles(self, source: str) -> bool:
        """Return whether a program is a member but for numbers: those of its text, its code, its slots."""
        return self._form.fullmatch(_NUMBER.sub("#", source.strip())) is not None

    @cached_property
    def _form(self) -> re.Pattern[str]:
        pieces = _SLOT.split(self.template.strip("\n"))
        return re.compile("[#\\w ]+".join(re.escape(_NUMBER.sub("#", piece)) for piece in pieces[::2]))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        seen: set[str] = set()

        def slot(match: re.Match[str]) -> str:
            name = match[1]
            if name in seen or name not in (*self.slots, "noun"):
                return r"[\w ]+"
            seen.add(name)
            return f"(?P<{name}>\\d{{1,2}}(?: \\d{{1,2}})*|[A-Za-z ]+)"

        # re.escape writes "$" as "\$"; slots that repeat or are derived are checked by writing again.
        return re.compile(re.sub(r"\\\$([a-z]+)", slot, re.escape(self.template.strip("\n"))))


class SizedFamily(Family):
    """A family with a range of places ``0..top``; its level is the share that its tries cover.

    ``tops[level]`` are the tops of a level, ``reserved`` the withheld ones.
    """

    slots: ClassVar[tuple[str, ...]] = ("top", "base", "end")
    tops: ClassVar[Mapping[int, tuple[int, ...]]]
    reserved: ClassVar[frozenset[int]]
    widths: ClassVar[tuple[int, ...]] = (2, 3)

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        """Return a top of ``level`` with a narrow window in which the places of all instances lie."""
        top = rng.choice([one for one in self.tops[level] if (one in self.reserved) is withheld])
        width = min(top, rng.choice(self.widths))
        base = rng.randint(0, top - width)
        return {"base": base, "end": base + width, "top": top}

    def level(self, parameters: Parameters) -> int:
        share = self.tries(parameters) / self.places(parameters)
        return next((level for level, bound in enumerate(_COVERED, start=1) if share >= bound), LEVELS[-1])

    def places(self, parameters: Parameters) -> int:
        """Return the number of places of the range."""
        return int(parameters["top"]) + 1

    def withheld(self, parameters: Parameters) -> bool:
        return int(parameters["top"]) in self.reserved

    def fill(self, parameters: Parameters) -> Parameters:
        return within(parameters)

    def hint(self, parameters: Parameters) -> str:
        return f"{parameters['base']}..{parameters['end']}"

    def blurt(self, observation: str, rng: Random) -> Script:
        top = numbers(observation)[1]
        return stubborn(lambda: rng.randint(0, top), rng)
