"""Programs that are there already, in the place of a designer: a directory, Reasoning Gym, or gem.

The n-th ticket of a run gets the n-th program of a seeded order, and the order is drawn anew after each pass:
the same on every host, in any order of answers, and after a restart (reference spec 10).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import PoolConfig
    from engine.evals.external_benchmarks import Foreign

SCHEMES = ("dir:", "reasoning_gym:", "gem:")
_KEY = "designer.pool.source"


class Programs:
    """A fixed list of (name, source), dealt without replacement.

    A program that is not accepted is replaced, in the ticket's further attempts, by one of an order of its
    own, so that it takes none away from other tickets.
    """

    trained: ClassVar[bool] = False

    def __init__(self, programs: Sequence[tuple[str, str]], *, seed: int) -> None:
        self._programs, self._seed = sorted(programs), seed
        self._dealt: set[str] = set()
        self._passes = self._spares = 0

    @classmethod
    def open(cls, settings: PoolConfig) -> Programs:
        """Read the programs of a recipe; blocks on files and imports. Raises ConfigError without any."""
        programs = list(read(settings.source))
        if not programs:
            raise ConfigError(
                f"{_KEY} = {settings.source!r} holds no program.", remedy="Programs are files *.py below it."
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
        self._dealt.add(name)
        return name, source

    def _order(self, purpose: str, number: int) -> list[int]:
        order = list(range(len(self._programs)))
        random.Random(f"{self._seed}/{purpose}/{number}").shuffle(order)
        return order

    def statistics(self) -> dict[str, float]:
        """Programs, how many of them were dealt, passes begun, and replacements for refused ones."""
        return {
            "programs": len(self._programs),
            "dealt": len(self._dealt),
            "passes": self._passes,
            "spares": self._spares,
        }


def read(source: str) -> Iterator[tuple[str, str]]:
    """Yield the (name, source) of every program of a source. Raises ConfigError."""
    scheme, colon, argument = source.partition(":")
    match scheme if colon else "":
        case "dir":
            yield from _directory(Path(argument).expanduser())
        case "reasoning_gym" | "gem":
            yield from _foreign(scheme, {name.strip() for name in argument.split(",") if name.strip()})
        case _:
            known = ", ".join(SCHEMES)
            raise ConfigError(f"{_KEY} = {source!r} is none of {known}.", remedy="Example: dir:my/programs.")


def _directory(root: Path) -> Iterator[tuple[str, str]]:
    if not root.is_dir():
        raise ConfigError(f"{_KEY} names {root}, which is no directory.", remedy="Give the path of one.")
    for path in root.rglob("*.py"):
        if not path.is_file():
            continue
        try:
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not a text in UTF-8.", where=_KEY, remedy="Mend it.") from error


def _foreign(package: str, wanted: set[str]) -> Iterator[tuple[str, str]]:
    from engine.evals import external_benchmarks

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
            remedy="Leave the names away for all.",
        )
    for name in wanted or programs:
        for program in programs[name]:
            yield f"{package}/{program.name}/{program.level}", program.source
