"""Suites of programs: those of the seed families, and those of a directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.config import Config, SuiteConfig
from engine.errors import ConfigError
from engine.evals import suite as suites
from engine.evals.suite import Item, Outcome, Program, Seat, Suite
from engine.nano import seeds
from roles.work_loop import sampling_seed

_DEFAULT_ITEMS = 480


class Programs(Suite):
    """A suite whose items are programs: ``data`` is one, ``text`` its source."""

    async def play(self, item: Item, seat: Seat) -> Outcome:
        return await seat.play(item.data)


class Generated(Programs):
    """``seeds:NAME``: programs of the seed families with withheld parameters."""

    def __init__(self, level: str, config: Config) -> None:
        seeds.held_out(level, 1, 0, config.warmstart.families)  # refuses an unknown level
        self.level, self.families = level, config.warmstart.families
        self.split = "test" if level in seeds.TEST else "validation"

    def items(self, count: int, seed: int) -> Sequence[Item]:
        held = seeds.held_out(self.level, count or _DEFAULT_ITEMS, seed, self.families)
        return [
            Item(
                name=str(index),
                group=one.family,
                text=one.source,
                data=Program(one.source, one.seed, one.max_turns),
            )
            for index, one in enumerate(held)
        ]


class Directory(Programs):
    """``dir:PATH``: the ``*.py`` programs of a directory in turn, with new seeds in each pass."""

    def __init__(self, path: str, config: Config) -> None:
        files = sorted(Path(path).glob("*.py")) if path else []
        self.programs = [(file.stem, file.read_text(encoding="utf-8")) for file in files]
        self.label, self.max_turns = Path(path).name, config.agent.max_turns
        if not self.programs:
            raise ConfigError(
                f"there is no program (*.py) in {path!r}", remedy="Name a directory of programs."
            )

    def items(self, count: int, seed: int) -> Sequence[Item]:
        found = []
        for index in range(count or _DEFAULT_ITEMS):
            family, source = self.programs[index % len(self.programs)]
            instance = sampling_seed(seed, family, index // len(self.programs))
            program = Program(source, instance, self.max_turns)
            found.append(Item(name=str(index), group=family, text=source, data=program))
        return found


# The names of the entry points.
generated, directory = Generated, Directory


def load_suite(suite: SuiteConfig, config: Config) -> tuple[Suite, list[Item]]:
    """Load a suite of a recipe and its items; blocks on files.

    The run's seed decides the items, so each evaluation of a run plays the same ones. Raises ConfigError for
    an unknown scheme or argument, and for a suite that lacks something here.
    """
    where = f"evaluator.suites: {suite.name}"
    found = suites.load(suite.source, config, where=where)
    missing = found.available()
    if missing:
        raise ConfigError(f"source = {suite.source!r} cannot be played: {missing}", where=where)
    return found, list(found.items(suite.episodes, config.run.seed))
