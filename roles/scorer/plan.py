"""Geometry of the curriculum: which cohort lives when, which skill a slot has, which seeds are played.

Everything here is arithmetic on the recipe, so two hosts agree without talking.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from bus.messages import stable_id
from engine.config import Config, CurriculumConfig
from engine.errors import ConfigError
from roles.scorer.advantages import designer_labels

_SEED_BITS = 31

FEWEST_COMPARED = 4
"""Below this mean number of designs a centring group, much of the reward is lost in the mean."""


class Life(NamedTuple):
    """The rounds of one cohort, counted from the first round of its segment.

    It is played in rounds ``opens .. last``; its designer samples belong to the batch of round ``due``.
    """

    opens: int
    last: int
    due: int
    size: int


def life(settings: CurriculumConfig, index: int) -> Life:
    """Return the life of the ``index``-th cohort of a segment (a run, or one extension of it).

    ``epoch``: all environments together, every R rounds. ``rolling``: cohort i retires after round i, so
    the first R cohorts share the opening round and live 1..R rounds; their windows are the tails of windows
    that opened before the start, and ``due`` counts from there: k - R rounds after the window's end, or with
    its last round for k = 0.
    """
    window, held = settings.rounds_per_window, settings.held_rounds
    if settings.schedule == "epoch":
        opens = index * window
        return Life(opens, opens + window - 1, opens + held, settings.environments)
    base, more = divmod(settings.environments, window)
    size = base + (1 if index % window < more else 0)
    return Life(max(0, index - window + 1), index, index - window + 1 + held, size)


def skills(config: Config, cohort: int, size: int) -> list[str]:
    """Return the skill of every slot of a cohort.

    Cohort c uses ``skills_per_cohort`` consecutive skills starting at c * s mod n, ticket i the (i mod s)-th
    of them (reference spec 1.3). With all skills active the start moves by the cohort's tickets instead, and
    s never exceeds them, so that no skill is starved by cohorts smaller than the list. The slots of a ticket
    share its skill.
    """
    names = config.designer.skills
    count = config.designer.skills_per_cohort
    each = config.designer.designs_per_ticket
    tickets = -(-size // each)
    if 0 < count < len(names):
        count = min(count, max(tickets, 1))
        start = cohort * count
    else:
        count, start = len(names), cohort * tickets
    return [names[(start + slot // each % count) % len(names)] for slot in range(size)]


class Place(NamedTuple):
    """Where a ticket stands: how many come before it in the plan, and how many of those have its skill."""

    number: int
    turn: int


def place(config: Config, cohort: int, slot: int) -> Place:
    """Return the place of a slot's ticket. Sizes and skills of cohorts repeat: no count of the past is taken.

    A document is dealt by place: that is the same on every host, in any order of answers, and after a
    restart (see ``roles.designer.corpus``).
    """
    each = config.designer.designs_per_ticket
    period = len(config.designer.skills) * (
        config.curriculum.rounds_per_window if config.curriculum.schedule == "rolling" else 1
    )
    sizes = [life(config.curriculum, index).size for index in range(period)]
    tickets = [skills(config, index, sizes[index])[::each] for index in range(period)]
    # After an extension of the run, uneven cohorts do not repeat as counted here.
    size = max(sizes[cohort % period], slot + 1)
    mine, before = skills(config, cohort, size)[::each], slot // each
    full, rest = divmod(cohort, period)
    number = full * sum(map(len, tickets)) + sum(map(len, tickets[:rest])) + before
    same = [names.count(mine[before]) for names in tickets]
    turn = full * sum(same) + sum(same[:rest]) + mine[:before].count(mine[before])
    return Place(number, turn)


def compared(config: Config) -> float | None:
    """Return the mean number of designs that a design of the policy is centred with, itself among them.

    None where the designer is not trained.
    """
    training, each = config.learner.designer, config.designer.designs_per_ticket
    if config.designer.kind != "policy" or training.weight == 0:
        return None
    window, count = config.curriculum.rounds_per_window, len(config.designer.skills)
    sizes: list[int] = []
    for index in range(window * count):
        size = life(config.curriculum, index).size
        tickets = [f"{slot // each}" for slot in range(size)]
        sizes += Counter(designer_labels(skills(config, index, size), training, tickets)).values()
    return sum(size * size for size in sizes) / sum(sizes)


def seed(run_seed: int, *parts: object) -> int:
    """Return a seed in [0, 2**31) that depends on the run's seed and ``parts`` only."""
    digits = stable_id("seed", run_seed, *parts).rpartition("-")[2]
    return int(digits, 16) & ((1 << _SEED_BITS) - 1)


def check(config: Config) -> None:
    """Refuse a recipe under which the loop could not turn or would train nothing. Raises ConfigError."""
    c, learner = config.curriculum, config.learner
    _require(c.rounds_per_window >= 1, "curriculum.rounds_per_window must be at least 1")
    _require(
        c.delay == 0 or c.delay >= c.rounds_per_window,
        f"curriculum.delay (k = {c.delay}) is smaller than rounds_per_window (R = {c.rounds_per_window})",
        "A reward is known when its window closes: use k >= R, or 0 for the window's last round.",
    )
    _require(c.environments >= 1 and c.plays_per_round >= 1, "curriculum needs an environment and a play")
    _require(
        min(c.hinted_plays, c.lead, c.design_ahead, c.reissues) >= 0,
        "curriculum.hinted_plays, lead, design_ahead and reissues must not be negative",
    )
    _require(
        1 <= c.hinted_rounds <= c.rounds_per_window,
        f"curriculum.hinted_rounds = {c.hinted_rounds} must lie in [1, rounds_per_window]",
    )
    _require(
        c.mode == "async" or c.lead == c.design_ahead == 0,
        f'curriculum.mode = "sync" contradicts lead = {c.lead} and design_ahead = {c.design_ahead}',
        "Nothing is done ahead in it: set both to 0.",
    )
    _require(bool(config.designer.skills), "designer.skills is empty")
    _require(config.run.steps >= 0, "run.steps must not be negative")
    oldest = c.held_rounds + c.design_ahead + c.lead
    _require(
        learner.designer.max_staleness >= oldest,
        f"learner.designer.max_staleness = {learner.designer.max_staleness} drops every design",
        f"Designer tokens are {oldest} versions old when they are trained (delay, design_ahead and lead).",
    )
    _require(
        learner.agent.max_staleness >= c.lead,
        f"learner.agent.max_staleness = {learner.agent.max_staleness} is smaller than curriculum.lead",
        f"Agent tokens may be {c.lead} versions old when they are trained.",
    )


def _require(holds: bool, what: str, remedy: str = "") -> None:
    if not holds:
        raise ConfigError(what, where="curriculum", remedy=remedy)
