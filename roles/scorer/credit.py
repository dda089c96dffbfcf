"""Credit for designs: what a cohort earned when its window closes, and what of it is sent. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from bus.messages import EnvironmentScored
from engine.config import Config, RewardConfig
from roles.scorer.advantages import designer_labels, idle, normalise
from roles.scorer.reports import scored
from roles.scorer.rewards import CORRECTED, REFERENCE, Evidence, Own, Tracker, raw_rewards, regret_credit
from roles.scorer.state import Cohort, Design, Held
from roles.scorer.window_stats import evidence_of, measured, paid


class _Entry(NamedTuple):
    """An attempt at a design and what it earned."""

    design: str
    attempt: int
    skill: str
    valid: bool
    reward: float


def penalises(config: Config) -> bool:
    """Whether invalid attempts are trained: those of a designer that is trained, unless they are dropped."""
    return config.designer.kind == "policy" and config.designer.invalid == "penalise"


def settle(
    config: Config,
    tracker: Tracker,
    cohort: Cohort,
    designs: Sequence[Design],
    round_: int,
    own: Own | None = None,
) -> tuple[list[EnvironmentScored], list[Held]]:
    """Close the window of ``cohort`` in ``round_``: score its designs, give credit to their tokens.

    Invalid attempts are part of their skill's (or group's) mean under ``designer.invalid = "penalise"``. A
    design that was never played has no reward and is not trained; those of a designer that is not the policy
    have a reward and no credit. A hint whose tokens are held earns the regret, among hints. ``own`` is a
    reward that is not built in. Moves the moving averages of ``tracker``.
    """
    settings = config.reward
    found = [measured(config, design) for design in designs]
    proofs = [
        evidence_of(config, design, statistics, estimate)
        for design, statistics, estimate in zip(designs, found, paid(settings, found), strict=True)
    ]
    rules = REFERENCE if settings.reference_parity else CORRECTED
    rewards = raw_rewards(proofs, settings, tracker, rules, own)
    entries = [
        _Entry(design.design, design.attempt, design.skill, True, reward)
        for design, reward in zip(designs, rewards, strict=True)
        if reward is not None
    ]
    if penalises(config):
        entries += [_Entry(*where, False, settings.invalid_reward) for where in cohort.rejected]
    programs = _programs(config, cohort, entries)
    credit = {item.design: item for item in programs if item.valid}
    scores = [
        scored(config, design, statistics, proof, credit.get(design.design), round_)
        for design, statistics, proof in zip(designs, found, proofs, strict=True)
    ]
    if config.designer.kind != "policy":
        return scores, []
    hints = [_hint(cohort, design, settings, proof) for design, proof in zip(designs, proofs, strict=True)]
    return scores, [*programs, *_compared(hints, config)]


def _programs(config: Config, cohort: Cohort, entries: Sequence[_Entry]) -> list[Held]:
    """Give programs their advantage among those of their ticket, their skill, or the cohort."""
    settings, each = config.learner.designer, config.designer.designs_per_ticket
    ticket = {name: f"cohort-{cohort.number}-{slot // each}" for slot, name in enumerate(cohort.designs)}
    groups = [ticket[entry.design] for entry in entries]
    labels = designer_labels([entry.skill for entry in entries], settings, groups)
    advantages = normalise([entry.reward for entry in entries], labels, settings)
    members = Counter(labels)
    return [
        Held(
            entry.design,
            entry.attempt,
            cohort.number,
            entry.skill,
            entry.valid,
            entry.reward,
            advantage if config.designer.kind == "policy" else 0.0,
            cohort.due,
            group=group if settings.scope == "group" else "",
            members=members[label],
        )
        for entry, advantage, group, label in zip(entries, advantages, groups, labels, strict=True)
    ]


def _hint(cohort: Cohort, design: Design, settings: RewardConfig, proof: Evidence) -> Held | None:
    """The tokens of a hint that will be trained, with the regret as their reward."""
    if not design.hint_held or proof.regret is None:
        return None
    reward = (
        settings.degenerate_reward if proof.broken else regret_credit(proof.regret, settings.regret_scale)
    )
    where = (design.design, design.attempt, cohort.number, design.skill)
    return Held(*where, True, reward, 0.0, cohort.due, part="hint")


def _compared(hints: Sequence[Held | None], config: Config) -> list[Held]:
    """Give hints their advantage, centred among those of their skill, or of the cohort."""
    held, settings = [hint for hint in hints if hint is not None], config.learner.designer
    labels = ["" if settings.scope == "global" else hint.skill for hint in held]
    advantages = normalise([hint.reward for hint in held], labels, settings)
    members = Counter(labels)
    return [
        msgspec.structs.replace(hint, advantage=value, members=members[label])
        for hint, value, label in zip(held, advantages, labels, strict=True)
    ]


def worth_sending(config: Config, due: Sequence[Held]) -> list[Held]:
    """Return those of ``due`` that the learner has a use for, as with plays: the rest is counted, not sent.

    Designs that were compared with each other leave the weights alone when their rewards do not differ. An
    accepted one is sent all the same where the supervised mix learns from it.
    """
    learner = config.learner
    archived = learner.supervised_mix > 0 and learner.supervised_source == "accepted"
    compared: dict[tuple[int, str, str, str], list[float]] = {}
    for item in due:
        compared.setdefault(_peers(item, config), []).append(item.advantage)
    return [
        item
        for item in due
        if not idle(compared[_peers(item, config)], learner) or (archived and item.valid and not item.part)
    ]


def _peers(item: Held, config: Config) -> tuple[int, str, str, str]:
    """Return what those have in common that a held sample was compared with."""
    skill = "" if config.learner.designer.scope == "global" else item.skill
    return item.cohort, item.part, item.group, skill
