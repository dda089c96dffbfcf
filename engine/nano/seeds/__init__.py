"""Seed families: the environments a nano policy is warm-started on, and the held-out ones it is judged by.

A family is one class (``engine.nano.seeds.base.Family``). The built-in ones are listed here; a recipe names
its own with importable names, ``"package.module:Class"``, in ``[warmstart].families``.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from engine.errors import ConfigError
from engine.nano.seeds.base import LEVELS as LEVELS
from engine.nano.seeds.base import MAX_TURNS as MAX_TURNS
from engine.nano.seeds.base import NOUNS as NOUNS
from engine.nano.seeds.base import Family as Family

BUILT_IN: tuple[str, ...] = (
    "engine.nano.seeds.sequence:Sequence",
    "engine.nano.seeds.guess:Guess",
    "engine.nano.seeds.walk:Walk",
    "engine.nano.seeds.cycle:Cycle",
    "engine.nano.seeds.peak:Peak",
    "engine.nano.seeds.levers:Levers",
)

UNSEEN: tuple[str, ...] = ("engine.nano.seeds.unseen:Shelf", "engine.nano.seeds.unseen:Rota")
"""Families that no warm start shows: the episodes of the suite ``unseen``."""

SUITES: dict[str, tuple[int, ...]] = {
    "easy": (1, 2),
    "mid": (3, 4),
    "hard": (5, 6),
    "validation": (3, 4, 5, 6),
    "test": (3, 4, 5, 6),
    "unseen": (2, 3, 4, 5),
}
TEST = frozenset({"test", "unseen"})
"""Suites that are reported and choose nothing. They share no program with the others."""


@dataclass(frozen=True)
class SeedDocument:
    """Two sentences that a design is grounded in."""

    id: str
    skill: str
    text: str


@dataclass(frozen=True)
class HeldOut:
    """One held-out episode: a program with withheld parameters and the seed of its instance."""

    source: str
    seed: int
    family: str
    level: int
    max_turns: int


def families(names: Sequence[str] = ()) -> tuple[Family, ...]:
    """Return the families named, the built-in ones for an empty list.

    A name is ``"package.module:Class"`` or the short name of a built-in family.
    Raises ConfigError for a name that cannot be imported or is no Family, and for two of one name.
    """
    found = _load(tuple(names) or BUILT_IN)
    doubled = {family.name for family in found if sum(other.name == family.name for other in found) > 1}
    if doubled:
        raise ConfigError(f"Two seed families are called {', '.join(sorted(doubled))}.")
    return found


def documents(names: Sequence[str] = ()) -> tuple[SeedDocument, ...]:
    """Return all documents of the families named: every text with every noun, in a fixed order."""
    return tuple(
        SeedDocument(id=f"{family.name}-{index}-{noun}", skill=family.skill, text=text.format(noun=noun))
        for family in families(names)
        for index, text in enumerate(family.documents)
        for noun in NOUNS
    )


def classify(source: str, names: Sequence[str] = ()) -> tuple[str, int] | None:
    """Return (family name, level 1-6) of a program, None when it is no member of any family.

    A program whose text and code disagree (say, on the number of tries) is no member.
    """
    for family in families(names):
        read = family.parse(source)
        if read is not None:
            return family.name, family.level(read[0])
    return None


def recognise(source: str, names: Sequence[str] = ()) -> tuple[Family, bool] | None:
    """Return the family of a program, and whether its text and its code agree; None when it is of none."""
    for family in families(names):
        if family.parse(source) is not None:
            return family, True
    return next(((family, False) for family in families(names) if family.resembles(source)), None)


def held_out(suite: str, episodes: int, seed: int, names: Sequence[str] = ()) -> list[HeldOut]:
    """Return ``episodes`` episodes of a suite, families in turn, withheld parameters only.

    The suites of ``TEST`` and the others halve the withheld parameters between them, and are the same for
    every seed. The same arguments give the same list. Raises ConfigError for an unknown suite.
    """
    levels = SUITES.get(suite)
    if levels is None:
        raise ConfigError(f"There is no held-out suite {suite!r}.", remedy=f"Suites: {', '.join(SUITES)}.")
    test = suite in TEST
    rng = Random(f"held-out {suite}" if test else f"held-out {suite} {seed}")
    chosen = [
        (family, [level for level in levels if level in family.held_levels])
        for family in families(UNSEEN if suite == "unseen" else names)
        if set(levels) & set(family.held_levels)
    ]
    episodes_list = []
    for index in range(episodes):
        family, own = chosen[index % len(chosen)]
        level = own[(index // len(chosen)) % len(own)]
        source = family.program(family.draw(level, rng, withheld=True), rng.choice(NOUNS))
        while _is_test(source) is not test:
            source = family.program(family.draw(level, rng, withheld=True), rng.choice(NOUNS))
        episodes_list.append(
            HeldOut(
                source=source,
                # The corpus draws its instances below 2**20.
                seed=rng.randrange(1 << 20, 1 << 30),
                family=family.name,
                level=level,
                max_turns=family.max_turns,
            )
        )
    return episodes_list


def _is_test(source: str) -> bool:
    """Return to which half of the withheld programs one belongs."""
    return zlib.crc32(source.encode()) % 2 == 0


@cache
def _load(names: tuple[str, ...]) -> tuple[Family, ...]:
    short = {name.rpartition(".")[2].partition(":")[0]: name for name in BUILT_IN}
    return tuple(_import(short.get(name, name)) for name in names)


def _import(name: str) -> Family:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute or "")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"The seed family {name!r} cannot be imported: {error}.",
            where="[warmstart].families",
            remedy='Write it as "package.module:Class", or use a built-in name.',
        ) from error
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise ConfigError(f"{name!r} is no engine.nano.seeds.Family.", where="[warmstart].families")
    return found()
