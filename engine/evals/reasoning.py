"""Reasoning Gym's hard split: 100 data sets in four groups, generated and judged in the sandbox."""

from __future__ import annotations

import importlib
import random
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from engine.config import Config, SamplingConfig
from engine.errors import ConfigError
from engine.evals import external_benchmarks
from engine.evals.statistics import RIGHT
from engine.evals.suite import Item, Outcome, Program, Seat, Split, Suite, paper_and_smoke, spread, version_of
from sandbox import SandboxSettings

PER_DATASET = 8
SIZE = 500
SEEDS: dict[Split, int] = {"test": 42, "validation": 1042}
_TABLE = Path(__file__).with_name("reasoning_gym_hard.toml")
_GROUPS = {
    "Math": ("algebra", "arithmetic", "geometry", "graphs"),
    "Algorithmic": ("algorithmic", "code"),
    "Cognition": ("arc", "cognition", "games"),
    "Logic": ("induction", "logic"),
}
_PROGRAM = '''
import reasoning_gym


class {title}Env:
    """Reasoning Gym's {name} with the settings of the hard split; the seed is the number of the entry."""

    def reset(self, seed):
        self.data = reasoning_gym.create_dataset({name!r}, seed={seed}, size={size}, **{settings!r})
        self.entry = self.data[seed]
        return self.entry["question"], {{}}

    def step(self, action):
        score = float(self.data.score_answer(action, self.entry))
        return f"score {{score:.3f}}", max(0.0, min(1.0, score)), True, False, {{}}

    def solution(self):
        return [self.entry["answer"]]
'''


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return the settings of each data set of the hard split."""
    return tomllib.loads(_TABLE.read_text())


class HardSplit(Suite):
    """``reasoning-gym-hard``: eight entries of each data set; an answer that scores 1 wins."""

    version = version_of("reasoning-gym")
    needs = ("reasoning_gym", "pycosat")
    install = "pip install --no-deps -r requirements/evals.lock pycosat==0.6.6"
    presets: ClassVar = paper_and_smoke(
        SamplingConfig(temperature=0.6, top_p=0.8, top_k=20, max_tokens=8192),
        items=800,
        smoke_items=8,
        smoke_tokens=128,
    )

    def __init__(self, split: Split) -> None:
        self.split = split

    def items(self, count: int, seed: int) -> Sequence[Item]:
        external_benchmarks.reasoning_gym()
        factory = importlib.import_module("reasoning_gym.factory")
        group_of = {part: group for group, parts in _GROUPS.items() for part in parts}
        found = []
        for number in range(PER_DATASET):
            for name in table():
                part = factory.DATASETS[name][0].__module__.split(".")[1]
                found.append(Item(name=f"{name}/{number}", group=group_of[part], data=(name, number)))
        return spread(found, count)

    def program(self, name: str) -> str:
        """Return the program that plays the data set ``name``."""
        title, seed = external_benchmarks.class_name(name), SEEDS[self.split]
        return _PROGRAM.format(title=title, name=name, seed=seed, size=SIZE, settings=table()[name])

    async def play(self, item: Item, seat: Seat) -> Outcome:
        name, number = item.data
        outcome = await seat.play(Program(self.program(name), number, 1))
        won = float(outcome.score >= RIGHT)
        return msgspec.structs.replace(
            outcome, score=won, detail=outcome.detail | {"dataset": name, "returned": outcome.score}
        )

    def guess(self, item: Item, messages: Sequence[str], rng: random.Random) -> str:
        """Answer with the right answer to another entry of the data set."""
        name = item.data[0]
        gym = external_benchmarks.reasoning_gym()
        other = rng.randrange(10_000, 1_000_000)
        data = gym.create_dataset(name, seed=SEEDS[self.split] + other, size=1, **table()[name])
        return f"\\boxed{{{data[0]['answer']}}}"

    def sandbox(self, settings: SandboxSettings) -> SandboxSettings:
        return msgspec.structs.replace(
            external_benchmarks.settings(settings),
            memory_mb=max(settings.memory_mb, 768),
            cpu_load_seconds=max(settings.cpu_load_seconds, 90.0),
            cpu_call_seconds=max(settings.cpu_call_seconds, 30.0),
            cpu_life_seconds=max(settings.cpu_life_seconds, 180),
            wall_call_seconds=max(settings.wall_call_seconds, 120.0),
            wall_hard_seconds=max(settings.wall_hard_seconds, 300.0),
            # its zygotes read all data and make each data set once before they report
            start_seconds=max(settings.start_seconds, 300.0),
            strikes=0,
        )


def hard_split(argument: str, config: Config) -> HardSplit:
    """Return ``reasoning-gym-hard`` or, with other entries, ``reasoning-gym-hard:validation``."""
    if argument not in ("", *SEEDS):
        raise ConfigError(f"There is no split {argument!r}.", remedy=f"Splits: {', '.join(SEEDS)}.")
    return HardSplit("validation" if argument == "validation" else "test")
