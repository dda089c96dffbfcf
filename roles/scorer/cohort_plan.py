"""Geometry of the curriculum: rounds in which a cohort is played, skills of its slots, derived seeds.

Everything here is arithmetic on the recipe, so two hosts agree without talking.
"""

from __future__ import annotations

from typing import NamedTuple

from bus.messages import stable_id
from engine.config import CurriculumConfig, DesignerConfig

_SEED_BITS = 31


class CohortRounds(NamedTuple):
    """The rounds of one cohort, counted from the first round of its segment.

    It is played in rounds ``opens .. last``; its designer samples belong to the batch of round ``due``.
    """

    opens: int
    last: int
    due: int
    size: int


def rounds_of(settings: CurriculumConfig, index: int) -> CohortRounds:
    """Return the rounds of the ``index``-th cohort of a segment (a run, or one extension of it).

    ``epoch``: all environments together, every R rounds. ``rolling``: cohort i retires after round i, so
    the first R cohorts share the opening round and live 1..R rounds; their windows are the tails of windows
    that opened before the start, and ``due`` counts from there: k - R rounds after the window's end, or with
    its last round for k = 0.
    """
    window, held = settings.rounds_per_window, settings.held_rounds
    if settings.schedule == "epoch":
        opens = index * window
        return CohortRounds(opens, opens + window - 1, opens + held, settings.environments)
    base, more = divmod(settings.environments, window)
    size = base + (1 if index % window < more else 0)
    return CohortRounds(max(0, index - window + 1), index, index - window + 1 + held, size)


def skills(designer: DesignerConfig, cohort: int, size: int) -> list[str]:
    """Return the skill of every slot of a cohort.

    Cohort c uses ``skills_per_cohort`` consecutive skills starting at c * s mod n, ticket i the (i mod s)-th
    of them (reference spec 1.3). With all skills active the start moves by the cohort's tickets instead, and
    s never exceeds them, so that no skill is starved by cohorts smaller than the list. The slots of a ticket
    share its skill.
    """
    names = designer.skills
    count = designer.skills_per_cohort
    each = designer.designs_per_ticket
    tickets = -(-size // each)
    if 0 < count < len(names):
        count = min(count, max(tickets, 1))
        start = cohort * count
    else:
        count, start = len(names), cohort * tickets
    return [names[(start + slot // each % count) % len(names)] for slot in range(size)]


class TicketPlace(NamedTuple):
    """Place of a ticket in the run's plan: ``number`` tickets before it, ``turn`` of them of its skill."""

    number: int
    turn: int


def place(designer: DesignerConfig, curriculum: CurriculumConfig, cohort: int, slot: int) -> TicketPlace:
    """Return the place of a slot's ticket. Sizes and skills of cohorts repeat, so nothing is counted.

    A document is dealt by place: that is the same on every host, in any order of answers, and after a
    restart (see ``roles.designer.corpus``).
    """
    each = designer.designs_per_ticket
    rolling = curriculum.schedule == "rolling"
    period = len(designer.skills) * (curriculum.rounds_per_window if rolling else 1)
    sizes = [rounds_of(curriculum, index).size for index in range(period)]
    tickets = [skills(designer, index, sizes[index])[::each] for index in range(period)]
    # After an extension of the run, uneven cohorts do not repeat as counted here.
    size = max(sizes[cohort % period], slot + 1)
    mine, before = skills(designer, cohort, size)[::each], slot // each
    full, rest = divmod(cohort, period)
    number = full * sum(map(len, tickets)) + sum(map(len, tickets[:rest])) + before
    same = [names.count(mine[before]) for names in tickets]
    turn = full * sum(same) + sum(same[:rest]) + mine[:before].count(mine[before])
    return TicketPlace(number, turn)


def seed(run_seed: int, *parts: object) -> int:
    """Return a seed in [0, 2**31) that depends on the run's seed and ``parts`` only."""
    digits = stable_id("seed", run_seed, *parts).rpartition("-")[2]
    return int(digits, 16) & ((1 << _SEED_BITS) - 1)
