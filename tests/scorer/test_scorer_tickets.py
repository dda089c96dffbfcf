"""Tickets: several designs of one prompt, tickets that are asked for again, tokens that come too late."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from scenes.scorer_world import World, config, design_all, failed, play_all, ready, rejected, start, step

from bus.messages import DesignTicket, Message
from engine.config import Config
from roles.scorer import cohort_plan, scheduling
from roles.scorer.credit import mean_group_size
from roles.scorer.curriculum import Curriculum
from roles.scorer.state import Command

ONE_ROUND = {"environments": 4, "rounds_per_window": 1, "delay": 1, "hinted_plays": 0}
BY_GROUP = {
    "designer": {"max_staleness": 64, "normalise": "zscore", "scope": "group", "advantage_scale": 1.0}
}


def grouped(each: int = 2, **tables: Any) -> Config:
    tables = {"curriculum": ONE_ROUND, "learner": BY_GROUP, "steps": 1, **tables}
    designer = {"designs_per_ticket": each, **tables.pop("designer", {})}
    return config(designer=designer, **tables)


def answer(world: World, machine: Curriculum, message: Message) -> list[Command]:
    """Tell an event; return the commands it led to."""
    world.tell(machine, message)
    return world.given[len(world.log)]


def test_a_group_is_one_ticket_of_several_designs() -> None:
    world, machine = start(grouped())
    first, second = world.tickets.values()
    assert [ticket.slot for ticket in (first, second)] == [0, 2]
    assert (first.number, second.number) == (0, 1)
    assert {first.skill, second.skill} == {"Logic", "Optimization"}
    parts = first.parts()
    assert [part.slot for part in parts] == [0, 1]
    assert [part.design for part in parts] == list(first.designs)
    assert {(part.skill, part.seed, part.number) for part in parts} == {
        (first.skill, first.seed, first.number)
    }
    assert machine.statistics()["open_tickets"] == 4, "each design is waited for"
    assert [part.parts() for part in parts] == [(part,) for part in parts]


def test_designs_are_compared_with_those_of_their_prompt() -> None:
    """Two groups, one won and lost, one always won: only the first has an advantage, and not by skill."""
    world, machine = start(grouped(designer={"skills": ["Logic"]}))
    first, second = world.tickets.values()
    good, bad = first.parts()
    design_all(world, machine)
    half = {good.design}
    play_all(world, machine, lambda request: float(request.index % 2 or request.design not in half))
    held = {h.design: h for _, h in world.designs.values()}
    assert held[good.design].reward > held[bad.design].reward
    assert held[good.design].advantage == pytest.approx(1.0)
    assert held[bad.design].advantage == pytest.approx(-1.0)
    assert [held[part.design].advantage for part in second.parts()] == [0.0, 0.0]
    assert held[good.design].group == held[bad.design].group != held[second.design].group


def test_refused_attempts_are_members_of_their_group() -> None:
    world, machine = start(grouped())
    first, _ = world.tickets.values()
    good, bad = first.parts()
    world.tell(machine, rejected(bad, 0))
    world.tell(machine, rejected(bad, 1))
    world.tell(machine, failed(bad, 2))
    world.tell(machine, ready(good))
    del world.tickets[first.design]
    design_all(world, machine)
    play_all(world, machine)
    mine = [h for _, h in world.designs.values() if h.design in first.designs]
    assert Counter(h.valid for h in mine) == {False: 2, True: 1}
    assert {(h.group, h.members) for h in mine} == {(mine[0].group, 3)}
    assert sum(h.advantage for h in mine) == pytest.approx(0)
    assert all(h.advantage > 0 for h in mine if h.valid)


def test_the_slots_of_a_ticket_share_a_skill_and_no_skill_starves() -> None:
    recipe = grouped(designer={"skills": ["m", "l", "s"]})
    names = [cohort_plan.skills(recipe.designer, cohort, 4) for cohort in range(3)]
    assert all(skills[::2] == skills[1::2] for skills in names)
    assert set(Counter(skill for skills in names for skill in skills).values()) == {4}
    places = [
        cohort_plan.place(recipe.designer, recipe.curriculum, cohort, slot)
        for cohort in range(6)
        for slot in (0, 2)
    ]
    assert [place.number for place in places] == list(range(12))


def reissuing(reissues: int = 2, **tables: Any) -> tuple[World, Curriculum, DesignTicket]:
    curriculum = ONE_ROUND | {"environments": 2, "reissues": reissues}
    world, machine = start(config(steps=1, curriculum=curriculum, **tables))
    return world, machine, next(iter(world.tickets.values()))


def test_a_ticket_that_met_faults_is_asked_for_again() -> None:
    world, machine, ticket = reissuing()
    for issue in (1, 2):
        world.tell(machine, failed(ticket, 0, failure="infra"))
        again = world.tickets[ticket.design]
        assert again.issue == issue
        assert again.tail != ticket.tail, "the broker may still hold the last one"
        assert again.key != ticket.key
        assert again in machine.outstanding()
        world.tell(machine, failed(ticket, 0, failure="infra"))
        assert world.tickets[ticket.design] is again, "old news of an earlier issue"
        ticket = again
    world.tell(machine, failed(ticket, 0, failure="infra"))
    del world.tickets[ticket.design]
    assert machine.state.designs[ticket.design].status == "failed"
    assert machine.statistics()["reissued"] == 2
    design_all(world, machine)
    play_all(world, machine)
    assert world.summaries[0].failures == {"design_infra": 1}


def test_what_the_policy_failed_at_is_not_asked_again() -> None:
    world, machine, ticket = reissuing()
    world.tell(machine, failed(ticket, 5))
    assert machine.state.designs[ticket.design].status == "failed"
    assert machine.statistics()["reissued"] == 0


def test_an_answer_to_an_earlier_issue_counts() -> None:
    world, machine, ticket = reissuing()
    world.tell(machine, failed(ticket, 0, failure="infra"))
    world.tell(machine, ready(ticket))
    assert machine.state.designs[ticket.design].status == "ready"


def test_a_group_is_asked_for_again_once() -> None:
    world, machine = start(grouped(curriculum=ONE_ROUND | {"reissues": 1}))
    ticket = next(iter(world.tickets.values()))
    one, two = ticket.parts()
    world.tell(machine, ready(one))
    world.tell(machine, failed(two, 0, failure="infra"))
    again = world.tickets[ticket.design]
    assert (again.issue, again.designs) == (1, ticket.designs)
    world.tell(machine, ready(again.parts()[1]))
    assert [machine.state.designs[part.design].status for part in ticket.parts()] == ["ready", "ready"]

    world, machine = start(grouped(curriculum=ONE_ROUND | {"reissues": 1}))
    ticket = next(iter(world.tickets.values()))
    for part in ticket.parts():
        world.tell(machine, failed(part, 0, failure="infra"))
    assert machine.statistics()["reissued"] == 1, "one ticket, though two designs failed"
    assert scheduling.newest_issue(world.config, machine.state, machine.state.designs[ticket.design]) == 1


def test_late_answers_change_nothing() -> None:
    world, machine = start(config(steps=2, curriculum=ONE_ROUND))
    slow = next(iter(world.tickets.values()))
    while not machine.finished:
        if slow.design in world.tickets:
            del world.tickets[slow.design]
            world.tell(machine, failed(slow, 0))
        step(world, machine)
    for number, late in enumerate((ready(slow), rejected(slow, 1), failed(slow, 5)), start=1):
        assert answer(world, machine, late) == []
        assert machine.state.late == number


@pytest.mark.parametrize("kind", ["frozen", "external", "pool"])
def test_designs_of_others_have_a_reward_and_no_credit(kind: str) -> None:
    world, machine = start(config(steps=1, curriculum=ONE_ROUND, designer={"kind": kind}))
    ticket = next(iter(world.tickets.values()))
    assert answer(world, machine, rejected(ticket, 0)) == []
    design_all(world, machine)
    play_all(world, machine)
    assert not world.designs
    assert [closed.designer_samples for closed in world.closed] == [0, 0]
    assert {score.reward for score in world.scored.values()} == {0.6}
    assert {score.advantage for score in world.scored.values()} == {0.0}
    assert world.summaries[0].rejected == 1


@pytest.mark.parametrize(
    ("scope", "skills", "active", "each", "mean"),
    [
        ("skill", 4, 0, 1, 1.0),
        ("skill", 4, 2, 1, 1.0),
        ("skill", 4, 1, 1, 2.0),
        ("skill", 1, 0, 1, 2.0),
        ("global", 4, 0, 1, 2.0),
        ("group", 1, 0, 1, 1.0),
        ("group", 4, 0, 2, 2.0),
    ],
)
def test_how_many_designs_are_compared(scope: str, skills: int, active: int, each: int, mean: float) -> None:
    """Cohorts of two designs."""
    names = [f"skill {number}" for number in range(skills)]
    table = config(
        curriculum={"environments": 4, "rounds_per_window": 2, "delay": 2},
        designer={"skills": names, "skills_per_cohort": active, "designs_per_ticket": each},
        learner={"designer": {"scope": scope}},
    )
    assert mean_group_size(table) == mean


def test_groups_of_two_sizes_count_by_their_designs() -> None:
    """Four designs over three skills: two designs have a companion, two are alone."""
    names = ["Logic", "Optimization", "Patterns"]
    uneven = config(
        curriculum={"environments": 4, "rounds_per_window": 1, "delay": 1},
        designer={"skills": names, "skills_per_cohort": 0},
    )
    assert mean_group_size(uneven) == pytest.approx((2 * 2 + 1 + 1) / 4)


def test_designs_that_are_not_trained_are_compared_with_none() -> None:
    untrained = {"weight": 0.0, "max_staleness": 64}
    assert mean_group_size(config(learner={"designer": untrained})) is None
