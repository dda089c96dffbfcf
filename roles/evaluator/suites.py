"""Held-out suites: a registry of their sources, and their episodes as requests.

A suite's ``source`` is ``SCHEME:ARGUMENT``. Schemes are the entry points of the group ``spade.suites``, the
built-in ones like those of other packages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bus.messages import EpisodeRequest, stable_id
from engine import registry
from engine.config import Config, SuiteConfig
from engine.errors import ConfigError
from engine.nano import seeds
from roles.work_loop import sampling_seed


class HeldOutEpisode(NamedTuple):
    """One held-out episode: a program, the seed of its instance, the family it counts for, its turns."""

    source: str
    seed: int
    family: str
    max_turns: int


class HeldOutItem(NamedTuple):
    """One held-out episode as a request, and the family it counts for."""

    request: EpisodeRequest
    family: str


SuiteSource = Callable[[SuiteConfig, str, Config], Sequence[HeldOutEpisode]]
"""Returns ``suite.episodes`` episodes for the argument of the source, the same at each call.

May block on files. Raises ConfigError for an unknown argument.
"""


def generated(suite: SuiteConfig, level: str, config: Config) -> list[HeldOutEpisode]:
    """Serve ``seeds:easy|mid|hard``: programs of the seed families with withheld parameters."""
    held = seeds.held_out(level, suite.episodes, config.run.seed, config.warmstart.families)
    return [HeldOutEpisode(one.source, one.seed, one.family, one.max_turns) for one in held]


def directory(suite: SuiteConfig, path: str, config: Config) -> list[HeldOutEpisode]:
    """Serve ``dir:PATH``: the ``*.py`` programs of a directory in turn, with new seeds in each pass."""
    programs = [(file.stem, file.read_text(encoding="utf-8")) for file in sorted(Path(path).glob("*.py"))]
    if not path or not programs:
        raise ConfigError(f"there is no program (*.py) in {path!r}", remedy="Name a directory of programs.")
    episodes = []
    for index in range(suite.episodes):
        family, source = programs[index % len(programs)]
        seed = sampling_seed(config.run.seed, suite.name, family, index // len(programs))
        episodes.append(HeldOutEpisode(source, seed, family, config.agent.max_turns))
    return episodes


def load_suite(suite: SuiteConfig, config: Config) -> list[HeldOutItem]:
    """Build the plain episodes of a suite; blocks on files.

    The run's seed decides the instances, so each evaluation of a run plays the same ones. Raises ConfigError
    for an unknown scheme or argument.
    """
    scheme, _, argument = suite.source.partition(":")
    where = f"evaluator.suites: {suite.name}"
    if not registry.has_scheme(registry.SUITES, suite.source):
        raise ConfigError(
            f"source = {suite.source!r} begins with no known scheme",
            where=where,
            remedy=f"It must begin with {registry.schemes(registry.SUITES)}.",
        )
    build: SuiteSource = registry.load(registry.SUITES, scheme, where=where)
    try:
        episodes = build(suite, argument, config)
    except ConfigError as error:
        what = f"source = {suite.source!r}: {error.what}"
        raise ConfigError(what, where=where, remedy=error.remedy) from error
    return [_item(suite, index, episode) for index, episode in enumerate(episodes)]


def _item(suite: SuiteConfig, index: int, episode: HeldOutEpisode) -> HeldOutItem:
    request = EpisodeRequest(
        episode=stable_id("held", suite.name, index),
        design="",
        environment=hashlib.sha256(episode.source.encode()).hexdigest(),
        arm="plain",
        round=0,
        index=index,
        seed=episode.seed,
        source=episode.source,
        hint=None,
        max_turns=episode.max_turns,
    )
    return HeldOutItem(request, episode.family)
