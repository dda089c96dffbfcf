"""Grading plays: from the returns of finished groups to the samples that are trained. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bus.messages import Arm, stable_id
from engine.config import Config
from roles.scorer.advantages import agent_label, idle, normalise
from roles.scorer.leaks import leaks
from roles.scorer.state import Design, Graded, Play, PublishGroup, Status, Tally


class Group(NamedTuple):
    """Plays of one design, round and arm."""

    design: Design
    arm: Arm
    plays: Sequence[Play]


def trains(config: Config, group: Group) -> bool:
    """Whether the plays of ``group`` are trained: plain ones, and with ``train_hinted`` hinted ones, unless
    their hint played the game and ``hint_leak`` is not to be reported only.
    """
    if group.arm == "plain":
        return True
    floored = config.reward.hint_leak == "floor" and leaks(group.plays)
    return config.learner.train_hinted and not floored


def grade(config: Config, round_: int, groups: Sequence[Group], tally: Tally) -> list[PublishGroup]:
    """Return the samples of finished ``groups`` and count them in ``tally``, as far as they are trained.

    Plays without an outcome have left their group. Groups whose returns do not differ are counted, and sent
    only where KL or entropy have a gradient. Truncated plays count in their group's mean; with
    ``agent.truncated = "mask"`` they are not sent.
    """
    settings, run = config.learner.agent, config.run.name
    groups = [group for group in groups if trains(config, group)]
    names = [stable_id("group", run, g.design.design, round_, g.arm) for g in groups]
    finished = [[(i, play) for i, play in enumerate(g.plays) if play.status is Status.DONE] for g in groups]
    returns = [play.returned for plays in finished for _, play in plays]
    labels = [
        agent_label(name, group.design.skill, group.arm, settings)
        for name, group, plays in zip(names, groups, finished, strict=True)
        for _ in plays
    ]
    advantages = iter(normalise(returns, labels, settings))
    commands = []
    for name, group, plays in zip(names, groups, finished, strict=True):
        weight = config.learner.hinted_weight if group.arm == "hinted" else 1.0
        values = [next(advantages) * weight for _ in plays]
        tally.plays += len(plays)
        tally.groups += bool(plays)
        tally.flat += bool(plays) and not any(values)
        if group.arm == "plain":
            tally.graded += sum(value != 0.0 for value in values)
        if plays and not idle(values, config.learner):
            graded = tuple(
                Graded(_sample(run, group, round_, index), play.sequence, play.returned, value)
                for (index, play), value in zip(plays, values, strict=True)
                if not (play.truncated and config.agent.truncated == "mask")
            )
            tally.agent_samples += len(graded)
            commands.append(PublishGroup(round_, group.design.skill, name, graded, len(plays)))
    return commands


def _sample(run: str, group: Group, round_: int, index: int) -> str:
    return stable_id("sample", run, group.design.design, round_, group.arm, index)
