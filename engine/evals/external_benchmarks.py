"""Environments by others under our contract: Reasoning Gym's datasets and gem's games.

A program here is a few lines that wrap one dataset at one level, or one game; it runs in the sandbox like any
other. The packages are optional (extra ``reasoning-gym``) and are imported in the zygote only, through
:mod:`engine.evals.held`, because an instance has no files to import from. Use :func:`settings` for the pool.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import msgspec

from engine import pools
from engine.errors import ConfigError
from sandbox import SandboxSettings

LEVELS = (None, 0, 1, 2)
HELD = "engine.evals.held"
# Needs pandas, whose import starts a thread: a zygote must not have any.
THREADED = "Crosswords"

# Reasoning Gym's packages import these to draw; no data set draws.
_DRAWING = ("drawsvg", "matplotlib", "mpl_toolkits")
_DRAWN = ("matplotlib.animation", "matplotlib.collections", "matplotlib.pyplot", "mpl_toolkits.mplot3d")

_REASONING_GYM = '''
import reasoning_gym
from reasoning_gym.factory import DATASETS, create_curriculum

NAME, LEVEL = {name!r}, {number!r}


class {title}Env:
    """Reasoning Gym's {name}, {level}."""

    def reset(self, seed):
        config = dict(seed=seed, size=1)
        if LEVEL is None:
            self.data = reasoning_gym.create_dataset(NAME, **config)
        else:
            curriculum = create_curriculum(NAME)
            curriculum.set_global_level(LEVEL)
            self.data = DATASETS[NAME][0](config=curriculum.generate_configuration(config))
        self.entry = self.data[0]
        return self.entry["question"], {{}}

    def step(self, action):
        score = float(self.data.score_answer(action, self.entry))
        return f"score {{score:.3f}}", score, True, False, {{}}
'''
_SOLUTION = """
    def solution(self):
        return [self.entry["answer"]]
"""
# Several answers are right, and the dataset's entries name none.
UNANSWERED = frozenset(("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"))

_GEM = '''
import gem


class {title}Env:
    """gem's {name}."""

    def __init__(self):
        self.game = gem.make({name!r})

    def reset(self, seed):
        observation, info = self.game.reset(seed)
        return f"{{observation}}\\n{{info.get('suffix', '')}}", {{}}

    def step(self, action):
        observation, reward, terminated, truncated, info = self.game.step("\\\\boxed{{" + action + "}}")
        return f"{{observation}}\\n{{info.get('suffix', '')}}", reward, terminated, truncated, {{}}
'''


class Foreign(NamedTuple):
    """One program: ``package``, the dataset's or game's ``name``, its ``level``, and the ``source``."""

    package: str
    name: str
    level: str
    source: str


def installed(package: str) -> bool:
    """Return whether ``package`` (``reasoning_gym`` or ``gem``) can be imported here."""
    return importlib.util.find_spec(package) is not None


class Absent(ModuleType):
    """Stands in for a package that is imported and not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


def reasoning_gym() -> Any:
    """Import Reasoning Gym, with stand-ins for the drawing packages that are not installed."""
    absent = {name for name in _DRAWING if name not in sys.modules and not installed(name)}
    for name in (*_DRAWING, *_DRAWN):
        if name.partition(".")[0] in absent:
            sys.modules[name] = Absent(name)
    return importlib.import_module("reasoning_gym")


def settings(base: SandboxSettings | None = None) -> SandboxSettings:
    """Return ``base`` with the packages, as far as they are installed, loaded in the zygotes."""
    base = base or SandboxSettings()
    wanted = dict.fromkeys([*base.preload, *preload("")])
    return msgspec.structs.replace(base, preload=tuple(wanted))


def preload(_argument: str) -> list[str]:
    """Return the modules that programs need in the sandbox."""
    return [pools.THREADLESS, HELD, *(package for package in ("reasoning_gym", "gem") if installed(package))]


def read_reasoning_gym(argument: str) -> Iterator[tuple[str, str]]:
    """Yield the programs of Reasoning Gym, or those of the datasets named. Raises ConfigError."""
    yield from _pool("reasoning_gym", argument)


def read_gem(argument: str) -> Iterator[tuple[str, str]]:
    """Yield the programs of gem, or those of the games named. Raises ConfigError."""
    yield from _pool("gem", argument)


def _pool(package: str, argument: str) -> Iterator[tuple[str, str]]:
    if not installed(package):
        raise ConfigError(
            f'{pools.KEY} = "{package}:" needs a package that is not installed.',
            remedy="docs/environments.md says how to install it.",
        )
    found: dict[str, list[Foreign]] = {}
    for one in reasoning_gym_programs() if package == "reasoning_gym" else gem_programs():
        found.setdefault(one.name, []).append(one)
    for name in pools.names(argument, found, package):
        for one in found[name]:
            yield f"{package}/{one.name}/{one.level}", one.source


def reasoning_gym_programs() -> Iterator[Foreign]:
    """Every dataset in its default configuration and, where it has a curriculum, at its first levels."""
    reasoning_gym()
    factory = importlib.import_module("reasoning_gym.factory")
    for name in sorted(factory.DATASETS):
        # a composite is made of the others
        if name == "composite":
            continue
        most = _highest(factory.create_curriculum(name)) if factory.has_curriculum(name) else -1
        for number in LEVELS:
            if number is not None and number > most:
                continue
            level = "as it comes" if number is None else f"level {number}"
            source = _REASONING_GYM.format(title=class_name(name), name=name, number=number, level=level)
            source += "" if name in UNANSWERED else _SOLUTION
            yield Foreign("reasoning_gym", name, level, source)


def _highest(curriculum: Any) -> int:
    return max((len(attribute.levels) - 1 for attribute in curriculum.attributes.values()), default=0)


def gem_programs() -> Iterator[Foreign]:
    """Every registered game but those of :data:`THREADED`, one program a difficulty."""
    registration = importlib.import_module("gem.envs.registration")
    for identifier in sorted(registration.ENV_REGISTRY):
        kind, _, name = identifier.partition(":")
        if kind == "game" and not name.startswith(THREADED):
            name, _, level = name.partition("-v0-")
            yield Foreign("gem", name, level, _GEM.format(title=class_name(name), name=identifier))


def class_name(name: str) -> str:
    """Return the name of a data set or game as a class is named."""
    return "".join(part.capitalize() if part.islower() else part for part in name.split("_"))
