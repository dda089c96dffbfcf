"""Credit: from returns of groups and rewards of designs to the advantages that are trained. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from bus.messages import Arm, Credit, stable_id
from engine.config import Config, DesignerConfig
from roles.scorer import cohort_plan
from roles.scorer.advantages import idle, label_of, normalise
from roles.scorer.parity import reference_rewards
from roles.scorer.rewards import Evidence, Reward, Tracker, raw_rewards
from roles.scorer.state import Cohort, Design, HeldCredit, Play, PlayStatus
from roles.scorer.window import Statistics, evidence, hint_leaks, measure

FEWEST_COMPARED = 4
"""Below this mean number of designs in a centring group, much of the reward is lost in the mean."""


class SettledDesign(NamedTuple):
    """A design at the end of its window; ``credit`` is None when its program has none."""

    design: Design
    found: Statistics
    proof: Evidence
    credit: Credit | None


class RoundCredit(NamedTuple):
    """The credit of a round's plays. ``plays`` and ``groups`` count all of them that are trained.

    ``flat`` groups have no gradient, ``graded`` plain plays have one; ``tokens`` is how many tokens each play
    sampled.
    """

    credits: tuple[Credit, ...] = ()
    plays: int = 0
    groups: int = 0
    flat: int = 0
    graded: int = 0
    tokens: tuple[int, ...] = ()


def penalises(designer: DesignerConfig) -> bool:
    """Return whether invalid attempts are trained: the designer is trained and does not drop them."""
    return designer.kind == "policy" and designer.invalid == "penalise"


class _Attempt(NamedTuple):
    """An attempt at a design, and the reward that it earned."""

    design: str
    sample: str
    skill: str
    valid: bool
    reward: float


def settle(
    config: Config, tracker: Tracker, cohort: Cohort, designs: Sequence[Design], reward: Reward
) -> tuple[list[SettledDesign], list[HeldCredit]]:
    """Close the window of ``cohort``: measure its designs, give credit to their tokens.

    Invalid attempts are part of their skill's (or group's) mean under ``designer.invalid = "penalise"``. A
    design that was never played has no reward and is not trained; those of a designer that is not the policy
    have a reward and no credit. Moves the averages of ``tracker``.
    """
    settings = config.reward
    seeds = [cohort_plan.seed(config.run.seed, design.design, "bootstrap") for design in designs]
    found = [measure(settings, design, seed) for design, seed in zip(designs, seeds, strict=True)]
    proofs = evidence(settings, designs, found)
    rewards = (
        reference_rewards(proofs, settings, tracker)
        if settings.reference_parity
        else raw_rewards(proofs, settings, tracker, reward)
    )
    attempts = [
        _Attempt(design.design, design.sample, design.skill, True, value)
        for design, value in zip(designs, rewards, strict=True)
        if value is not None
    ]
    if penalises(config.designer):
        attempts += [
            _Attempt(one.design, one.sample, one.skill, False, settings.invalid_reward)
            for one in cohort.rejected
        ]
    credits, held = _compare(config, cohort, attempts)
    credit = {one.design: given for one, given in zip(attempts, credits, strict=True) if one.valid}
    settled = [
        SettledDesign(design, statistics, proof, credit.get(design.design))
        for design, statistics, proof in zip(designs, found, proofs, strict=True)
    ]
    return settled, held


def _compare(
    config: Config, cohort: Cohort, attempts: Sequence[_Attempt]
) -> tuple[list[Credit], list[HeldCredit]]:
    """Give attempts their advantage among those of their ticket, their skill, or the cohort.

    As with plays, attempts that were compared leave the weights alone when their rewards do not differ: they
    are held without a credit, to be counted. An accepted one is sent all the same where the supervised mix
    learns from it.
    """
    learner, each = config.learner, config.designer.designs_per_ticket
    settings, trained = learner.designer, config.designer.kind == "policy"
    archived = learner.supervised_mix > 0 and learner.supervised_source == "accepted"
    ticket = {name: f"cohort-{cohort.number}-{slot // each}" for slot, name in enumerate(cohort.designs)}
    labels = [label_of(settings, ticket[one.design], one.skill) for one in attempts]
    advantages = normalise([one.reward for one in attempts], labels, settings) if trained else repeat(0.0)
    compared: dict[str, list[float]] = {}
    credits: list[Credit] = []
    for one, advantage, label in zip(attempts, advantages, labels, strict=trained):
        compared.setdefault(label, []).append(advantage)
        group = label if settings.scope == "group" else f"cohort-{cohort.number}"
        members = labels.count(label)
        credits.append(Credit(one.sample, "designer", group, one.reward, advantage, members, one.valid))
    held = []
    for one, given, label in zip(attempts, credits, labels, strict=True):
        pulls = not idle(compared[label], learner) or (archived and one.valid)
        held.append(HeldCredit(cohort.number, cohort.due, given if pulls and one.sample else None))
    return credits, held if trained else []


class PlayGroup(NamedTuple):
    """Plays of one design, round and arm."""

    design: Design
    arm: Arm
    plays: Sequence[Play]


def trains(config: Config, group: PlayGroup) -> bool:
    """Return whether the plays of ``group`` are trained.

    Plain ones are, and with ``train_hinted`` hinted ones, unless their hint gave the answer and ``hint_leak``
    is "floor".
    """
    if group.arm == "plain":
        return True
    floored = config.reward.hint_leak == "floor" and hint_leaks(group.plays)
    return config.learner.train_hinted and not floored


def grade(config: Config, round_: int, groups: Sequence[PlayGroup]) -> RoundCredit:
    """Return the credit of the plays of a round.

    Plays without an outcome have left their group. Groups whose returns do not differ are counted, and have a
    credit only where KL or entropy have a gradient. A truncated play counts in its group's mean; with
    ``agent.truncated = "mask"`` it has no tokens to credit.
    """
    settings, run = config.learner.agent, config.run.name
    groups = [group for group in groups if trains(config, group)]
    names = [stable_id("group", run, g.design.design, round_, g.arm) for g in groups]
    finished = [[play for play in group.plays if play.status is PlayStatus.DONE] for group in groups]
    labels = [
        label_of(settings, name, group.design.skill, group.arm)
        for name, group, plays in zip(names, groups, finished, strict=True)
        for _ in plays
    ]
    every = [play for plays in finished for play in plays]
    advantages = iter(normalise([play.returned for play in every], labels, settings))
    credits: list[Credit] = []
    flat = graded = 0
    for name, group, plays in zip(names, groups, finished, strict=True):
        weight = config.learner.hinted_weight if group.arm == "hinted" else 1.0
        values = [next(advantages) * weight for _ in plays]
        flat += bool(plays) and not any(values)
        graded += sum(value != 0.0 for value in values) if group.arm == "plain" else 0
        if not idle(values, config.learner):
            credits += [
                Credit(play.sample, "agent", name, play.returned, value, len(plays))
                for play, value in zip(plays, values, strict=True)
                if play.sample
            ]
    tokens = tuple(play.tokens for play in every)
    return RoundCredit(tuple(credits), len(every), sum(map(bool, finished)), flat, graded, tokens)


def mean_group_size(config: Config) -> float | None:
    """Return the mean number of designs that a design of the policy is centred with, itself among them.

    None where the designer is not trained.
    """
    training, each = config.learner.designer, config.designer.designs_per_ticket
    if config.designer.kind != "policy" or training.weight == 0:
        return None
    sizes: list[int] = []
    for index in range(config.curriculum.rounds_per_window * len(config.designer.skills)):
        size = cohort_plan.rounds_of(config.curriculum, index).size
        skills = cohort_plan.skills(config.designer, index, size)
        labels = [label_of(training, f"{slot // each}", skill) for slot, skill in enumerate(skills)]
        sizes += Counter(labels).values()
    return sum(size * size for size in sizes) / sum(sizes)
