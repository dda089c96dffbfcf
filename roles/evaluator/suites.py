"""Held-out suites as episode requests: the same programs and seeds at every evaluation."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from bus.messages import EpisodeRequest, stable_id
from engine.config import Config, SuiteConfig
from engine.errors import ConfigError
from roles.work_loop import sampling_seed


class Item(NamedTuple):
    """One held-out episode and the family it counts for."""

    request: EpisodeRequest
    family: str


def load_suite(suite: SuiteConfig, config: Config) -> list[Item]:
    """Build the ``suite.episodes`` plain episodes of a suite; blocks on files.

    ``seeds:LEVEL`` generates held-out programs of the seed families; ``dir:PATH`` takes the programs of a
    directory in turn, each with a new seed every time round. The run's seed decides the instances, so every
    evaluation of a run plays the same ones. Raises ConfigError for an unknown or empty source.
    """
    scheme, _, argument = suite.source.partition(":")
    if scheme == "seeds":
        return _generated(suite, config, argument)
    if scheme == "dir" and argument:
        return _directory(suite, config, Path(argument))
    raise ConfigError(
        f"unknown source {suite.source!r} of suite {suite.name!r}",
        where="evaluator.suites",
        remedy="use seeds:easy, seeds:mid, seeds:hard or dir:PATH",
    )


def _generated(suite: SuiteConfig, config: Config, level: str) -> list[Item]:
    from engine import seeds

    held = seeds.held_out(level, suite.episodes, config.run.seed, config.warmstart.families)
    return [
        _item(suite, index, source=one.source, seed=one.seed, family=one.family, turns=one.max_turns)
        for index, one in enumerate(held)
    ]


def _directory(suite: SuiteConfig, config: Config, root: Path) -> list[Item]:
    programs = [(path.stem, path.read_text(encoding="utf-8")) for path in sorted(root.glob("*.py"))]
    if not programs:
        raise ConfigError(
            f"suite {suite.name!r} has no program: {root}",
            where="evaluator.suites",
            remedy="name a directory of *.py",
        )
    items = []
    for index in range(suite.episodes):
        family, source = programs[index % len(programs)]
        seed = sampling_seed(config.run.seed, suite.name, family, index // len(programs))
        items.append(
            _item(suite, index, source=source, seed=seed, family=family, turns=config.agent.max_turns)
        )
    return items


def _item(suite: SuiteConfig, index: int, *, source: str, seed: int, family: str, turns: int) -> Item:
    request = EpisodeRequest(
        episode=stable_id("held", suite.name, index),
        design="",
        environment=hashlib.sha256(source.encode()).hexdigest(),
        skill=family,
        arm="plain",
        round=0,
        index=index,
        seed=seed,
        source=source,
        hint=None,
        max_turns=turns,
    )
    return Item(request, family)
