"""Small runs with known programs in their databases."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from bus.messages import EnvironmentReady, EnvironmentScored, Message
from engine import recipe
from engine.records import diversity, history
from engine.run import RunDirectory
from scenes.small_run import config, events, finished, ready, scored, summary

GAMES = ("apples", "rivers", "castles", "clocks", "violins", "comets", "bridges", "foxes")


def source(word: str, number: int = 0) -> str:
    """A program that plays and says ``word``; programs of other words share what all programs have."""
    return (
        f"import random\nclass {word.title()}Env:\n    max_turns = 3\n    def reset(self, seed):\n"
        f"        self.t, self.k = 0, random.Random(seed).randint(0, 3)\n"
        f"        return 'the {word} {word} of {word} number {number}, which?'\n"
        f"    def step(self, action):\n        self.t += 1\n        won = int(action) == self.k\n"
        f"        return '{word}', float(won), won or self.t >= 3, False, {{}}\n"
    )


def written(
    design: str, text: str, *, cohort: int = 0, skill: str = "Logical Deduction", document: str = ""
) -> EnvironmentReady:
    """The fact that ``design`` is the program ``text``."""
    name = hashlib.sha256(text.encode()).hexdigest()
    return ready(design, cohort, source=text, environment=name, skill=skill, document=document)


def judged(fact: EnvironmentReady, **fields: object) -> EnvironmentScored:
    """The fact that the window of a design closed."""
    known = {"environment": fact.environment, "skill": fact.skill, "document": fact.document}
    return scored(fact.design, fact.cohort, **({"cohort": fact.cohort} | known | fields))


def played(round_: int, designs: Sequence[str]) -> list[Message]:
    """A whole round: a won and a lost plain play and a hinted one of each design, then its summary."""
    plays: list[Message] = []
    for design in designs:
        plays += [
            finished(f"{design}-{round_}-{index}", design, returned, arm, round_=round_)
            for index, (arm, returned) in enumerate((("plain", 1.0), ("plain", 0.0), ("hinted", 1.0)))
        ]
    return [*plays, summary(round_)]


def run_with(directory: Path, messages: Sequence[Message], name: str = "toy") -> RunDirectory:
    """A run that rests, with these facts in its database."""
    run = RunDirectory(directory / name)
    run.root.mkdir(parents=True)
    run.config_file.write_text(recipe.dump(config(directory)))
    connection = history.create(run.database)
    history.apply(connection, events(list(messages)))
    while diversity.record(connection):
        pass
    connection.close()
    return run
