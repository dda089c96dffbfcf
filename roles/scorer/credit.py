"""Credit for what was played: advantages of a group, of a cohort, and the summary of a round. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from bus.messages import Arm, EnvironmentScored, RoundClosed, RoundSummary, Standing, State, stable_id
from engine.config import Config, Reward
from roles.scorer import plan
from roles.scorer.advantages import agent_label, designer_labels, idle, normalise
from roles.scorer.leaks import leaks
from roles.scorer.regret import shrink
from roles.scorer.rewards import (
    BROKEN_SHARE,
    CORRECTED,
    REFERENCE,
    Evidence,
    Own,
    Tracker,
    plateau,
    raw_rewards,
    regret_credit,
)
from roles.scorer.state import Cohort, Design, Graded, Held, Play, PublishGroup, Status, Tally
from roles.scorer.window import Statistics, Window, measure
from roles.scorer.work import ARMS

_BINS = 10


class Group(NamedTuple):
    """Plays of one design, round and arm."""

    design: Design
    arm: Arm
    plays: Sequence[Play]


def trains(config: Config, group: Group) -> bool:
    """Whether the plays of ``group`` are trained: plain ones, and with ``train_hinted`` hinted ones, unless
    their hint played the game and ``hint_leak`` is not to be reported only."""
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


def window_of(design: Design) -> Window:
    """Return the outcomes of a design so far."""

    def returns(plays: Sequence[Play]) -> dict[int, float]:
        return {i: play.returned for i, play in enumerate(plays) if play.status is Status.DONE}

    return Window(
        plain={number: returns(plays.plain) for number, plays in design.rounds.items()},
        hinted={number: returns(plays.hinted) for number, plays in design.rounds.items() if plays.hinted},
    )


def _plays(design: Design, arm: Arm) -> list[Play]:
    return [play for plays in design.rounds.values() for play in plays.arm(arm)]


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
    found = [_measured(config, design) for design in designs]
    evidence = [
        _evidence(config, design, statistics, estimate)
        for design, statistics, estimate in zip(designs, found, paid(settings, found), strict=True)
    ]
    rules = REFERENCE if settings.reference_parity else CORRECTED
    rewards = raw_rewards(evidence, settings, tracker, rules, own)
    entries = [
        (design.design, design.attempt, design.skill, True, reward)
        for design, reward in zip(designs, rewards, strict=True)
        if reward is not None
    ]
    if penalises(config):
        entries += [(name, n, skill, False, settings.invalid_reward) for name, n, skill in cohort.rejected]
    each, by_group = config.designer.designs_per_ticket, config.learner.designer.scope == "group"
    group = {name: f"cohort-{cohort.number}-{slot // each}" for slot, name in enumerate(cohort.designs)}
    groups = [group[entry[0]] for entry in entries]
    labels = designer_labels([entry[2] for entry in entries], config.learner.designer, groups)
    trained = config.designer.kind == "policy"
    advantages = (
        normalise([entry[4] for entry in entries], labels, config.learner.designer)
        if trained
        else [0.0] * len(entries)
    )
    members = Counter(labels)
    held = [
        Held(
            name,
            n,
            cohort.number,
            skill,
            valid,
            reward,
            advantage,
            cohort.due,
            group=group if by_group else "",
            members=members[label],
        )
        for (name, n, skill, valid, reward), advantage, group, label in zip(
            entries, advantages, groups, labels, strict=True
        )
    ]
    credit = {item.design: item for item in held if item.valid}
    scored = [
        _scored(config, design, statistics, proof, credit.get(design.design), round_)
        for design, statistics, proof in zip(designs, found, evidence, strict=True)
    ]
    hints = [_hint(cohort, design, settings, proof) for design, proof in zip(designs, evidence, strict=True)]
    return scored, [*held, *_compared(hints, config)] if trained else []


def standing(config: Config, design: Design) -> Standing:
    """Return how a design of an open window has done so far."""
    found = _measured(config, design)
    return Standing(
        design=design.design,
        environment=design.environment,
        state=_state(config.reward, found, _broken(config, design, found)),
        plays=found.plays,
        win=found.win,
        win_low=found.win_low,
        win_high=found.win_high,
        hinted_plays=found.hinted_plays,
        hinted=found.hinted,
        regret=found.regret,
        turns=_turns(design),
        noise_floor=found.noise_floor,
        leak=leaks(_plays(design, "hinted")),
    )


def _measured(config: Config, design: Design) -> Statistics:
    settings = config.reward
    return measure(
        window_of(design),
        plan.seed(config.run.seed, design.design, "bootstrap"),
        lowest=settings.lowest_return,
        confidence=settings.confidence,
    )


def paid(settings: Reward, found: Sequence[Statistics]) -> list[float | None]:
    """Return what of each measured regret is paid. Without pairs only the plain mean has anything to say."""
    if settings.regret_estimate == "mean":
        return [one.regret for one in found]
    if settings.regret_estimate == "lower":
        return [one.regret_lower for one in found]
    known = [
        (i, one.regret, one.regret_variance)
        for i, one in enumerate(found)
        if one.regret is not None and one.regret_variance is not None
    ]
    result: list[float | None] = [None] * len(found)
    for (i, _, _), value in zip(known, shrink([m for _, m, _ in known], [v for *_, v in known]), strict=True):
        result[i] = value
    return result


def _turns(design: Design) -> float | None:
    """Return the mean length of finished plain plays."""
    return _mean([float(play.turns) for play in _plays(design, "plain") if play.status is Status.DONE])


def _hint(cohort: Cohort, design: Design, settings: Reward, proof: Evidence) -> Held | None:
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


def _broken(config: Config, design: Design, found: Statistics) -> bool:
    """Whether a design earns the floor: flagged, degenerate, ending most of its own plays, or leaking."""
    crashes = sum(play.env_failed for play in _plays(design, "plain"))
    crashing = found.plays > 0 and crashes > BROKEN_SHARE * found.plays
    if config.reward.reference_parity:
        return design.degenerate or crashing
    leak = config.reward.hint_leak == "floor" and leaks(_plays(design, "hinted"))
    return design.degenerate or crashing or bool(design.flag) or leak


def _evidence(config: Config, design: Design, found: Statistics, estimate: float | None) -> Evidence:
    return Evidence(
        skill=design.skill,
        rounds=window_of(design).by_round,
        hinted=found.hinted,
        regret=estimate,
        broken=_broken(config, design, found),
        measured=found.regret,
        pairs=found.pairs,
        noise_floor=found.noise_floor,
        turns=_turns(design),
    )


class Versions(NamedTuple):
    """Which policies sampled the plays of a design: (oldest, newest) of each arm, and pairs without a common
    one."""

    plain: tuple[int, int] | None
    hinted: tuple[int, int] | None
    apart: int


def versions_of(design: Design) -> Versions:
    """Return the versions of the arms. Packed versions compare by learner, then by step."""
    arms = [
        [play.versions for play in _plays(design, arm) if play.status is Status.DONE and play.versions]
        for arm in ARMS
    ]
    plain, hinted = (
        (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None for spans in arms
    )
    pairs = [
        (one.versions, other.versions)
        for plays in design.rounds.values()
        for one, other in zip(plays.plain, plays.hinted, strict=False)
        if one.status is other.status is Status.DONE
    ]
    apart = sum(a[1] < b[0] or b[1] < a[0] for a, b in pairs if a and b)
    return Versions(plain, hinted, apart)


def _scored(
    config: Config, design: Design, found: Statistics, proof: Evidence, credit: Held | None, round_: int
) -> EnvironmentScored:
    settings, versions = config.reward, versions_of(design)
    return EnvironmentScored(
        design=design.design,
        cohort=design.cohort,
        environment=design.environment,
        skill=design.skill,
        document=design.document,
        round=round_,
        plays=found.plays,
        hinted_plays=found.hinted_plays,
        win=found.win,
        win_low=found.win_low,
        win_high=found.win_high,
        hinted=found.hinted,
        regret=found.regret,
        regret_low=found.regret_low,
        regret_high=found.regret_high,
        plateau=plateau(found.win, settings.low, settings.high, settings.ramp) if found.plays else 0.0,
        reward=credit.reward if credit else 0.0,
        advantage=credit.advantage if credit else 0.0,
        state=_state(settings, found, proof.broken),
        difficulty=design.difficulty,
        family=design.family,
        noise_floor=found.noise_floor,
        turns=proof.turns,
        asked=len(_plays(design, "plain")),
        pairs=found.pairs,
        pairs_apart=versions.apart,
        plain_versions=versions.plain,
        hinted_versions=versions.hinted,
        regret_paid=proof.regret,
        leak=leaks(_plays(design, "hinted")),
    )


def _state(settings: Reward, found: Statistics, broken: bool) -> State:
    """Mastered and intractable are where the plateau has fallen to zero; fresh was never played."""
    if broken:
        return "degenerate"
    if found.plays == 0:
        return "fresh"
    if found.win >= settings.high + settings.ramp:
        return "mastered"
    return "intractable" if found.win <= settings.low - settings.ramp else "frontier"


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


def close(
    round_: int, tally: Tally, due: Sequence[Held], sent: Sequence[Held], *, final: bool = False
) -> RoundClosed:
    """Return the message that closes a round, in which ``sent`` of the ``due`` designs are trained."""
    return RoundClosed(
        round=round_,
        plays=tally.plays,
        designs=len(due),
        agent_samples=tally.agent_samples,
        designer_samples=len(sent),
        zero_variance_groups=tally.flat,
        groups=tally.groups,
        final=final,
    )


def summarise(
    config: Config,
    round_: int,
    tally: Tally,
    designs: Iterable[Design],
    opening: Sequence[Cohort],
    scored: Sequence[EnvironmentScored],
    going_on: Sequence[Standing] = (),
) -> RoundSummary:
    """Return what the round looked like. ``opening`` cohorts had their first round now; windows that stay
    open are ``going_on``."""
    active = [(design, design.rounds[round_]) for design in designs if round_ in design.rounds]
    plain = [_returns(plays.plain) for _, plays in active]
    wins = [fmean(values) for values in plain if values]
    every = [value for values in plain for value in values]
    hinted = [value for _, plays in active for value in _returns(plays.hinted)]
    levels = [design.difficulty for design, _ in active if design.difficulty is not None]
    arms = [plays.arm(arm) for _, plays in active for arm in ARMS]
    missing = [sum(play.status is Status.LOST for play in arm) for arm in arms]
    histogram = [0] * _BINS
    for win in wins:
        histogram[min(_BINS - 1, max(0, int(win * _BINS)))] += 1
    failures = dict(tally.failures)
    for cohort in opening:
        for kind, count in cohort.failed.items():
            failures[f"design_{kind}"] = failures.get(f"design_{kind}", 0) + count
    rewards = [item.reward for item in scored if item.plays]
    in_band = [config.reward.low <= win <= config.reward.high for win in wins]
    return RoundSummary(
        round=round_,
        environments=len(active),
        accepted=sum(len(cohort.designs) - sum(cohort.failed.values()) for cohort in opening),
        rejected=sum(cohort.refused for cohort in opening),
        plain=_mean(every),
        hinted=_mean(hinted),
        in_band=_mean(in_band),
        gradient_share=tally.graded / len(every) if every else None,
        difficulty=_mean(levels),
        failures=failures,
        win_histogram=tuple(histogram),
        reward=_mean(rewards),
        standings=tuple(going_on),
        lost=sum(missing),
        partial=sum(map(bool, missing)),
    )


def _returns(plays: Sequence[Play]) -> list[float]:
    return [play.returned for play in plays if play.status is Status.DONE]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
