"""A pool of existing programs in place of a designer: a directory, Reasoning Gym, gem, or a plug-in's.

The n-th ticket of a run gets the n-th program of a seeded order, which is shuffled again after each pass: the
same on every host, in any order of answers, and after a restart. A kind of pool is an entry of the group
``spade.pools``: a function that yields (name, source) for the argument after the colon.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from engine import registry
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import PoolConfig
    from engine.evals.external_benchmarks import Foreign

_KEY = "designer.pool.source"


class Programs:
    """A fixed list of (name, source), drawn without replacement.

    A ticket's further attempts replace a rejected program by one of an order of their own, so that other
    tickets lose none.
    """

    trained: ClassVar[bool] = False

    def __init__(self, programs: Sequence[tuple[str, str]], *, seed: int) -> None:
        self._programs, self._seed = sorted(programs), seed
        self._drawn: set[str] = set()
        self._passes = self._spares = 0

    @classmethod
    def open(cls, settings: PoolConfig) -> Programs:
        """Read the programs of a recipe; blocks on files and imports. Raises ConfigError without any."""
        programs = list(read(settings.source))
        if not programs:
            raise ConfigError(
                f"{_KEY} = {settings.source!r} has no program.", remedy="Programs are files *.py below it."
            )
        return cls(programs, seed=settings.seed)

    def __len__(self) -> int:
        return len(self._programs)

    def draw(self, number: int, attempt: int) -> tuple[str, str]:
        """Return the name and the source of the program for attempt ``attempt`` at ticket ``number``."""
        turn, place = divmod(number, len(self._programs))
        chosen = self._order("pass", turn)[place]
        self._passes = max(self._passes, turn + 1)
        if attempt:
            others = [one for one in self._order("spare", number) if one != chosen] or [chosen]
            chosen = others[(attempt - 1) % len(others)]
            self._spares += 1
        name, source = self._programs[chosen]
        self._drawn.add(name)
        return name, source

    def _order(self, purpose: str, number: int) -> list[int]:
        order = list(range(len(self._programs)))
        random.Random(f"{self._seed}/{purpose}/{number}").shuffle(order)
        return order

    def statistics(self) -> dict[str, float]:
        """Return the numbers of programs, of drawn ones, of passes begun, and of replacements."""
        return {
            "programs": len(self._programs),
            "drawn": len(self._drawn),
            "passes": self._passes,
            "spares": self._spares,
        }


def read(source: str) -> Iterator[tuple[str, str]]:
    """Yield the (name, source) of every program of a pool. Raises ConfigError."""
    scheme, _, argument = source.partition(":")
    reader: Callable[[str], Iterator[tuple[str, str]]] = registry.load(registry.POOLS, scheme, where=_KEY)
    yield from reader(argument)


def read_directory(argument: str) -> Iterator[tuple[str, str]]:
    """Yield the files ``*.py`` below a directory. Raises ConfigError."""
    root = Path(argument).expanduser()
    if not argument or not root.is_dir():
        raise ConfigError(
            f"{_KEY} names {argument or 'no directory'!r}, which is not a directory.",
            remedy="Example: dir:my/programs.",
        )
    for path in root.rglob("*.py"):
        if not path.is_file():
            continue
        try:
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text.", where=_KEY, remedy="Save it in UTF-8.") from error


def read_reasoning_gym(argument: str) -> Iterator[tuple[str, str]]:
    """Yield the programs of Reasoning Gym, or those of the datasets named. Raises ConfigError."""
    yield from _external("reasoning_gym", argument)


def read_gem(argument: str) -> Iterator[tuple[str, str]]:
    """Yield the programs of gem, or those of the games named. Raises ConfigError."""
    yield from _external("gem", argument)


def _external(package: str, argument: str) -> Iterator[tuple[str, str]]:
    from engine.evals import external_benchmarks

    wanted = {name.strip() for name in argument.split(",") if name.strip()}
    if not external_benchmarks.installed(package):
        raise ConfigError(
            f'{_KEY} = "{package}:" needs a package that is not installed.',
            remedy="docs/environments.md says how to install it.",
        )
    programs: dict[str, list[Foreign]] = {}
    for program in (
        external_benchmarks.reasoning_gym_programs()
        if package == "reasoning_gym"
        else external_benchmarks.gem_programs()
    ):
        programs.setdefault(program.name, []).append(program)
    unknown = wanted - programs.keys()
    if unknown:
        raise ConfigError(
            f"{package} has no {', '.join(sorted(unknown))}.",
            where=_KEY,
            remedy="Name none of them to take all.",
        )
    for name in wanted or programs:
        for program in programs[name]:
            yield f"{package}/{program.name}/{program.level}", program.source
