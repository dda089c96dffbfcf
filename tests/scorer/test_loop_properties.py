"""Curriculum, buffer, lineage and restarts together: I1, I5, I6, I7, I8 and I11 over random schedules.

The short form is one of the fast tests, a longer one is marked ``fuzz``.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from learner_fakes import VOCABULARY
from loop_world import CALM, Loop, Luck
from scorer_world import config

from bus.messages import EpisodeFailed, EpisodeFinished, RoundClosed, SampleReady
from engine.config import Config
from engine.lineage import Version
from engine.training.buffer import Buffer
from engine.training.samples import versions
from roles.scorer.curriculum import Curriculum
from roles.scorer.state import Publish, PublishDesigns, PublishGroup

QUICK = settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)


@st.composite
def recipes(draw: st.DrawFn) -> Config:
    """Small recipes of every shape. Age bounds are as tight as they may be, or a little wider."""
    window = draw(st.integers(1, 3))
    delay = draw(st.sampled_from([0, window, window + 1, window + 2]))
    in_step = draw(st.integers(0, 3)) == 0
    lead = 0 if in_step else draw(st.integers(0, 2))
    ahead = 0 if in_step else draw(st.integers(0, 2))
    oldest = (delay or window - 1) + ahead + lead
    scope = st.sampled_from(["group", "group", "skill", "global"])
    quota = st.sampled_from([0, 0, 2])
    plays = draw(st.integers(1, 3))
    return config(
        steps=draw(st.integers(1, 4)),
        curriculum={
            "mode": "sync" if in_step else "async",
            "schedule": draw(st.sampled_from(["rolling", "epoch"])),
            "environments": draw(st.integers(1, 3)),
            "rounds_per_window": window,
            "delay": delay,
            "plays_per_round": plays,
            "hinted_plays": draw(st.integers(0, plays)),
            "hinted_rounds": draw(st.integers(1, window)),
            "lead": lead,
            "design_ahead": ahead,
            "reissues": draw(st.integers(0, 2)),
        },
        learner={
            "designer": {
                "max_staleness": oldest + draw(st.integers(0, 1)),
                "scope": draw(scope),
                "quota": draw(quota),
            },
            "agent": {
                "max_staleness": lead + draw(st.integers(0, 1)),
                "scope": draw(scope),
                "quota": draw(quota),
                "priority": draw(st.sampled_from(["oldest", "largest"])),
            },
            "train_hinted": draw(st.booleans()),
            "kl": draw(st.sampled_from([0.0, 0.01])),
        },
        designer={
            "skills": ["Logic", "Optimization"],
            "attempts": draw(st.integers(1, 3)),
            "invalid": draw(st.sampled_from(["penalise", "drop"])),
            "designs_per_ticket": draw(st.integers(1, 2)),
        },
        reward={"regret_estimate": draw(st.sampled_from(["mean", "shrunk", "lower"]))},
    )


def ended(loop: Loop) -> list[str]:
    """Return every sample that reached a terminal state along the surviving weights."""
    return [
        name
        for batch in loop.history
        for name in (*(s.sample for s in batch.selection.samples), *(n for n, _ in batch.selection.dropped))
    ]


def check_ends(loop: Loop) -> None:
    """I1, I7: each round is formed once, in order; each sample ends once; no designer's tokens are lost."""
    closed = list({m.round: m for m in loop.samples if isinstance(m, RoundClosed)}.values())
    assert [batch.message for batch in loop.history] == closed
    assert [m.round for m in closed] == list(range(len(closed)))
    assert closed[-1].final
    sent = {m.sample for m in loop.samples if isinstance(m, SampleReady)}
    assert Counter(ended(loop)) == Counter(sent)
    assert loop.missing_designs == 0
    assert all(batch.selection.missing == 0 for batch in loop.history)
    by_round = Counter[tuple[int, str]]()
    for message in {m.sample: m for m in loop.samples if isinstance(m, SampleReady)}.values():
        by_round[message.round, message.role] += 1
    for message in closed:
        assert message.agent_samples == by_round[message.round, "agent"]
        assert message.designer_samples == by_round[message.round, "designer"]
    assert not loop.held, "tokens of trained designs are purged"


def check_ages(loop: Loop) -> None:
    """I6, with ages counted along the tree of versions step by step."""
    for batch in loop.history:
        for sample, age in zip(batch.selection.samples, batch.selection.ages, strict=True):
            walked = max(loop.distance(batch.current, version) for version in versions(sample))
            assert age == walked <= getattr(loop.config.learner, sample.role).max_staleness
    causes = {cause for batch in loop.history for _, cause in batch.selection.dropped}
    waits = loop.config.learner.agent.quota or loop.config.learner.designer.quota
    assert causes <= ({"stale", "quota"} if waits else {"stale"})
    if not loop.counts["learner died"] and not waits:
        assert not causes, "pacing alone keeps work young enough"


def check_failures(loop: Loop) -> None:
    """I5: what infrastructure took away is in no group; every group says how many it has."""
    done: dict[tuple[str, int, str], set[int]] = defaultdict(set)
    lost = defaultdict(set)
    for message in loop.events:
        if isinstance(message, EpisodeFinished | EpisodeFailed):
            kind = done if isinstance(message, EpisodeFinished) else lost
            kind[message.design, message.round, message.arm].add(message.index)
    sizes = Counter[str]()
    members = {}
    for sample in {m.sample: m for m in loop.samples if isinstance(m, SampleReady)}.values():
        if sample.role == "agent":
            sizes[sample.group] += 1
            members[sample.group] = sample.members
    assert all(sizes[group] <= members[group] for group in sizes)
    assert sum(batch.message.plays for batch in loop.history) <= sum(map(len, done.values()))
    for key, indices in done.items():
        assert not indices & lost[key] or loop.config.curriculum.reissues or loop.counts["redelivered"]


def check_replay(loop: Loop) -> None:
    """I11: a scorer that has seen nothing says the same, a learner that has seen nothing trains the same."""
    machine = Curriculum(loop.config, flushed=loop.flushed)
    said = machine.start()
    for sequence, message in enumerate(loop.events, 1):
        said += machine.apply(sequence, message)
    assert machine.snapshot() == loop.machine.snapshot()
    expected: dict[str, tuple[int, float, int]] = {}
    for command in said:
        if isinstance(command, PublishGroup):
            for play in command.plays:
                expected[play.sample] = (command.round, play.advantage, command.members)
        elif isinstance(command, PublishDesigns):
            for name, held in zip(command.samples, command.held, strict=True):
                expected[name] = (command.round, held.advantage, held.members)
    samples = [m for m in loop.samples if isinstance(m, SampleReady)]
    assert {m.sample: (m.round, m.advantage, m.members) for m in samples} == expected
    work = {c.message.tail for c in said if isinstance(c, Publish) and c.message.tail.startswith("task.")}
    assert work == set(loop.asked)

    limits: Any = {"agent": loop.config.learner.agent, "designer": loop.config.learner.designer}
    buffer, batches = Buffer(limits, vocabulary=VOCABULARY), iter(loop.history)
    for sequence, message in enumerate(loop.samples, 1):
        if isinstance(message, SampleReady):
            buffer.admit(sequence, message)
        elif not buffer.closed(message.round):
            batch = next(batches)
            assert buffer.close(message, batch.current, batch.lineage) == batch.selection


def check_bounds(loop: Loop, *, tickets: int, plays: int) -> None:
    """I8: what is open is bounded by the pacing, whatever happens."""
    table = loop.config.curriculum
    active = table.environments * (table.plays_per_round + table.hinted_plays)
    assert plays <= (table.lead + 1) * active
    assert tickets <= table.environments * (table.lead + table.design_ahead + 2)
    state = loop.machine.state
    assert not any((state.designs, state.cohorts, state.held, state.tallies))


class Watched(Loop):
    """A loop that remembers the most work that was ever open."""

    most_tickets = most_plays = 0

    def _watch(self) -> None:
        super()._watch()
        state = self.machine.state
        self.most_plays = max(self.most_plays, sum(tally.pending for tally in state.tallies.values()))
        self.most_tickets = max(self.most_tickets, sum(cohort.asked for cohort in state.cohorts.values()))
        if self.config.curriculum.mode == "sync":
            assert not (self.most_plays and self.most_tickets and self._both())

    def _both(self) -> bool:
        state = self.machine.state
        return any(t.pending for t in state.tallies.values()) and any(c.asked for c in state.cohorts.values())


def check(loop: Watched) -> None:
    check_ends(loop)
    check_ages(loop)
    check_failures(loop)
    check_replay(loop)
    check_bounds(loop, tickets=loop.most_tickets, plays=loop.most_plays)


def any_schedule(recipe: Config, number: int, servers: int, every: int, drains: list[int], more: int) -> None:
    loop = Watched(recipe, random.Random(number), servers=servers, checkpoint_every=every)
    for facts in drains:
        loop.run(until=lambda facts=facts: len(loop.events) >= facts)  # type: ignore[misc]
        if not loop.over:
            loop.drain()
    loop.run()
    check(loop)
    if more:
        loop.extend(recipe.run.steps + more)
        assert not loop.machine.finished
        loop.run()
        check(loop)


SCHEDULES = {
    "recipe": recipes(),
    "number": st.integers(0, 2**32),
    "servers": st.integers(1, 2),
    "every": st.integers(1, 3),
    "drains": st.lists(st.integers(1, 200), max_size=2).map(sorted),
    "more": st.sampled_from([0, 0, 1, 2]),
}


@QUICK
@given(**SCHEDULES)
def test_any_schedule(**drawn: Any) -> None:
    any_schedule(**drawn)


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_many_schedules(request: pytest.FixtureRequest) -> None:
    """The long form has --fuzz-schedules 5000 (a minute on a free core); --fuzz-seed draws others."""
    many = settings(QUICK, max_examples=request.config.getoption("--fuzz-schedules"), database=None)
    drawn = seed(request.config.getoption("--fuzz-seed"))(many(given(**SCHEDULES)(any_schedule)))
    drawn()


def lock_step(**curriculum: Any) -> Config:
    table = {"rounds_per_window": 1, "delay": 0, "lead": 0, "design_ahead": 0, "environments": 2}
    return config(
        steps=8,
        curriculum=table | curriculum,
        learner={"designer": {"max_staleness": 0}, "agent": {"max_staleness": 0}},
    )


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_bound_of_zero_is_lock_step_and_drops_nothing(mode: str) -> None:
    loop = Watched(lock_step(mode=mode), random.Random(3), CALM, servers=2)
    loop.run()
    check(loop)
    assert len(loop.history) == 9
    assert all(age == 0 for batch in loop.history for age in batch.selection.ages)
    assert not any(batch.selection.dropped for batch in loop.history)
    assert loop.version == Version(0, 8)


@pytest.mark.parametrize("number", range(4))
def test_a_bound_of_zero_does_not_starve_when_the_learner_dies(number: int) -> None:
    luck = msgspec.structs.replace(CALM, learner_dies=0.1, crashes=6)
    loop = Watched(lock_step(), random.Random(number), luck, checkpoint_every=2)
    loop.run()
    check(loop)
    assert loop.counts["learner died"] > 0
    trained = [len(batch.selection.samples) for batch in loop.history[:-1]]
    assert sum(map(bool, trained)) >= len(trained) // 2


def test_the_world_can_do_all_it_says() -> None:
    """A world in which nothing ever goes wrong would prove nothing."""
    counts = Counter[str]()
    for number in range(12):
        recipe = config(steps=4, curriculum={"reissues": 1, "lead": 1})
        loop = Watched(recipe, random.Random(number), Luck(scorer_dies=0.05), checkpoint_every=2, servers=2)
        loop.run()
        check(loop)
        counts += loop.counts
        counts["sent twice"] += len(loop.samples) - len(loop.sample_keys)
        counts["servers lost"] += loop.epochs
        counts["stale"] += sum(len(batch.selection.dropped) for batch in loop.history)
        counts["forks"] += len(loop.lineage.forks) - 1
        counts["late"] += loop.machine.state.late
        counts["asked again"] += loop.machine.state.reissued
    missing = {"scorer died", "learner died", "redelivered", "sent twice", "servers lost", "forks", "late"}
    assert not {name for name in missing if not counts[name]}
    assert counts["asked again"]
