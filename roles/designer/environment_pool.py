"""A pool of existing programs in place of a designer: those of a directory, a run, or :mod:`engine.pools`.

The n-th ticket of a run gets the n-th program of a seeded order, which is shuffled again after each pass: the
same on every host, in any order of answers, and after a restart. With a sliding window it depends on the
wins so far, too. A kind of pool is an entry of the group ``spade.pools``: a function that yields (name,
source) for the argument after the colon.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

from engine import registry
from engine.errors import ConfigError
from engine.nano import seeds
from engine.records import history

if TYPE_CHECKING:
    from engine.config import PoolConfig
    from roles.designer.memory import MemoryRecord

_LEAST = 16
"""Programs of the highest level that must have been played before the window slides."""
_PER_LEVEL = 20
_KEY = "designer.pool.source"


class Programs:
    """A fixed list of (name, source), drawn without replacement.

    A ticket's further attempts replace a rejected program by one of an order of their own, so that other
    tickets lose none. With a ``window``, the level of a program is the number that its name begins with, and
    programs are drawn with replacement.
    """

    trained: ClassVar[bool] = False

    def __init__(
        self, programs: Sequence[tuple[str, str]], *, seed: int, window: int = 0, raise_at: float = 1.0
    ) -> None:
        self._programs, self._seed = sorted(programs), seed
        self._window, self._raise_at = window, raise_at
        self._top = 1

    @classmethod
    def open(cls, settings: PoolConfig) -> Programs:
        """Read the programs of a recipe; blocks on files and imports. Raises ConfigError without any."""
        programs = list(read(settings.source))
        if not programs:
            raise ConfigError(
                f"{_KEY} = {settings.source!r} has no program.", remedy="Programs are files *.py below it."
            )
        if settings.window and not all(_level(name) for name, _ in programs):
            raise ConfigError(
                "designer.pool.window needs the level of each program.",
                where=_KEY,
                remedy="Put programs into directories by level (1/name.py, 2/name.py), or use seeds:.",
            )
        return cls(programs, seed=settings.seed, window=settings.window, raise_at=settings.raise_at)

    def __len__(self) -> int:
        return len(self._programs)

    def draw(self, number: int, attempt: int, played: Iterable[MemoryRecord] = ()) -> tuple[str, str]:
        """Return the name and the source of the program for attempt ``attempt`` at ticket ``number``.

        ``played`` are the programs of the designer's memory: their wins move a sliding window.
        """
        if self._window:
            return self._slide(number, attempt, played)
        turn, place = divmod(number, len(self._programs))
        chosen = self._order("pass", turn)[place]
        if attempt:
            others = [one for one in self._order("spare", number) if one != chosen] or [chosen]
            chosen = others[(attempt - 1) % len(others)]
        return self._programs[chosen]

    def _slide(self, number: int, attempt: int, played: Iterable[MemoryRecord]) -> tuple[str, str]:
        wins: dict[int, list[float]] = {}
        levels = {source.strip(): _level(name) for name, source in self._programs}
        for record in played:
            if record.closed and record.standing is not None and record.source.strip() in levels:
                wins.setdefault(levels[record.source.strip()], []).append(record.standing.win)
        top = max(wins, default=1)
        last = wins.get(top, [])[-_LEAST:]
        if len(last) == _LEAST and fmean(last) >= self._raise_at:
            top = min(top + 1, max(_level(name) for name, _ in self._programs))
        self._top = max(self._top, top)
        fitting = [one for one in self._programs if self._top - self._window < _level(one[0]) <= self._top]
        return random.Random(f"{self._seed}/slide/{number}/{attempt}").choice(fitting)

    def _order(self, purpose: str, number: int) -> list[int]:
        order = list(range(len(self._programs)))
        random.Random(f"{self._seed}/{purpose}/{number}").shuffle(order)
        return order

    def statistics(self) -> dict[str, float]:
        """Return the number of programs, and the level of a sliding window."""
        return {"programs": len(self._programs), **({"level": self._top} if self._window else {})}


def _level(name: str) -> int:
    """Return the number that a program's name begins with, 0 without one."""
    level = name.partition("/")[0]
    return int(level) if level.isdecimal() else 0


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


def read_run(argument: str) -> Iterator[tuple[str, str]]:
    """Yield the first designs of a run: ``PATH``, or ``PATH?first=64``. Raises ConfigError."""
    path, _, first = argument.partition("?first=")
    database = Path(path).expanduser() / "run.db"
    if not database.is_file() or not (first or "64").isdecimal():
        raise ConfigError(
            f"{_KEY} names {argument!r}, which is no run.", remedy="Example: run:runs/nano?first=64."
        )
    query = "SELECT design, source FROM environments ORDER BY sequence LIMIT ?"
    with closing(history.open_for_reading(database)) as connection:
        try:
            yield from [tuple(row) for row in connection.execute(query, (int(first or 64),))]
        except sqlite3.Error as error:
            raise ConfigError(f"{database} cannot be read: {error}.", where=_KEY) from error


def read_seeds(argument: str) -> Iterator[tuple[str, str]]:
    """Yield programs of the seed families named (all for ""), of all their levels, none withheld."""
    for family in seeds.families([name for name in argument.split(",") if name]):
        rng = random.Random(f"pool {family.name}")
        for level in family.seed_levels:
            for index in range(_PER_LEVEL):
                parameters = family.draw(level, rng, withheld=False)
                name = f"{level}/{family.name}-{index:02d}"
                yield name, family.program(parameters, rng.choice(seeds.NOUNS))
