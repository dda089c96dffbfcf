"""Curriculum, buffer, lineage and restarts together: I1, I5, I6, I7, I8 and I11 over random schedules.

The short form is one of the fast tests, a longer one is marked ``fuzz``.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from learner_fakes import VOCABULARY
from scenes.loop_cast import CALM, Luck
from scenes.loop_world import Loop
from scenes.scorer_draws import recipes
from scenes.scorer_world import config

from bus.messages import (
    Credit,
    DesignSample,
    EnvironmentScored,
    EpisodeFailed,
    EpisodeFinished,
    EpisodeSample,
    RoundClosed,
)
from engine.config import Config
from engine.lineage import Version
from engine.training.buffer import Buffer
from engine.training.samples import versions
from roles.scorer import cohort_plan
from roles.scorer.curriculum import Curriculum
from roles.scorer.state import Publish

QUICK = settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)


def ended(loop: Loop) -> list[str]:
    """Return every sample that reached a terminal state along the surviving weights."""
    return [
        name
        for batch in loop.history
        for name in (*(s.sample for s in batch.selection.samples), *(n for n, _ in batch.selection.dropped))
    ]


def credited(loop: Loop) -> list[Credit]:
    """Return the credit of every round, in order."""
    return [credit for batch in loop.history for credit in batch.message.credits]


def check_ends(loop: Loop) -> None:
    """I1, I7: each round is formed once, in order; each credited sample ends once, and all others leave."""
    closed = list({m.round: m for m in loop.samples if isinstance(m, RoundClosed)}.values())
    assert [batch.message for batch in loop.history] == closed
    assert [m.round for m in closed] == list(range(len(closed)))
    assert closed[-1].final
    credits = Counter(credit.sample for credit in credited(loop))
    assert set(credits.values()) <= {1}, "each sample is credited once"
    assert Counter(ended(loop)) == credits
    assert all(batch.selection.missing == 0 for batch in loop.history), "tokens precede their credit"
    assert loop.buffer.state().kept == (), "samples without credit leave with their round or cohort"
    stored = {message.sample: message for message in loop.samples if not isinstance(message, RoundClosed)}
    facts = defaultdict(list)
    for fact in loop.events:
        if isinstance(fact, EpisodeFinished):
            facts[fact.sample].append(fact)
    for batch in loop.history:
        for credit in batch.message.credits:
            if credit.role == "agent":
                message = stored[credit.sample]
                assert isinstance(message, EpisodeSample)
                assert message.round == batch.message.round
                told = {(fact.episode, fact.returned) for fact in facts[credit.sample]}
                assert (message.episode, credit.reward) in told, "credit goes to the very tokens of a fact"


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
    for credit in credited(loop):
        if credit.role == "agent":
            sizes[credit.group] += 1
            members[credit.group] = credit.members
    assert all(sizes[group] <= members[group] for group in sizes)
    assert sum(batch.message.plays for batch in loop.history) <= sum(map(len, done.values()))
    for key, indices in done.items():
        assert not indices & lost[key] or loop.config.curriculum.reissues or loop.counts["redelivered"]


def check_credit(loop: Loop) -> None:
    """Advantages of compared samples add up to 0; samples without a gradient are only counted."""
    learner = loop.config.learner
    sums: dict[tuple[str, ...], list[float]] = defaultdict(list)
    sent = credited(loop)
    skills = {m.sample: m.skill for m in loop.samples if isinstance(m, DesignSample)}
    for credit in sent:
        assert math.isfinite(credit.advantage)
        if credit.role == "designer":
            skill = "" if learner.designer.scope == "global" else skills[credit.sample]
            sums[credit.group, skill].append(credit.advantage)
        elif learner.agent.scope == "group" and loop.config.agent.truncated == "zero":
            sums[credit.group, ""].append(credit.advantage)
    assert all(abs(sum(advantages)) < 1e-6 for advantages in sums.values())
    all_pull = learner.kl > 0
    for batch in loop.history:
        closed, idle = batch.message, batch.message.designs - batch.message.designer_samples
        assert 0 <= closed.zero_variance_groups <= closed.groups <= closed.plays >= closed.agent_samples
        assert idle == 0 if all_pull else idle >= 0
    if not all_pull and not learner.supervised_mix:
        assert all(any(advantages) for advantages in sums.values())
    scores = {m.design: m for m in loop.events if isinstance(m, EnvironmentScored)}.values()
    plain, hinted = sum(score.plays for score in scores), sum(score.hinted_plays for score in scores)
    trained = sum(batch.message.plays for batch in loop.history)
    if not learner.train_hinted:
        assert trained == plain, "each outcome is in one batch and in one score"
    elif loop.config.reward.hint_leak == "flag":
        assert trained == plain + hinted
    else:
        assert plain <= trained <= plain + hinted
        if loop.config.curriculum.hinted_rounds == 1:
            assert trained == plain + sum(score.hinted_plays for score in scores if not score.leak)
    if loop.config.designer.kind != "policy":
        assert all(credit.role == "agent" for credit in sent)
    settled = [batch.message.settled for batch in loop.history]
    assert settled == sorted(settled)
    assert settled[-1] == loop.machine.state.next_cohort
    cohorts = {m.sample: m.cohort for m in loop.samples if isinstance(m, DesignSample)}
    for batch in loop.history if len(loop.flushed) == 1 else ():
        for credit in batch.message.credits:
            if credit.role == "designer":
                due = cohort_plan.rounds_of(loop.config.curriculum, cohorts[credit.sample]).due
                assert batch.message.round == min(due, loop.config.run.steps), (
                    "designs are due in their round"
                )


def check_replay(loop: Loop) -> None:
    """I11: a scorer that has seen nothing says the same, a learner that has seen nothing trains the same."""
    machine = Curriculum(loop.config, flushed=loop.flushed)
    said = machine.start()
    for sequence, message in enumerate(loop.events, 1):
        said += machine.apply(sequence, message)
    assert machine.snapshot() == loop.machine.snapshot()
    messages = [command.message for command in said if isinstance(command, Publish)]
    rounds = [message for message in messages if isinstance(message, RoundClosed)]
    assert rounds == [batch.message for batch in loop.history]
    work = {message.tail for message in messages if message.tail.startswith("task.")}
    assert work == set(loop.asked)

    limits: Any = {"agent": loop.config.learner.agent, "designer": loop.config.learner.designer}
    buffer, batches = Buffer(limits, vocabulary=VOCABULARY), iter(loop.history)
    for sequence, message in enumerate(loop.samples, 1):
        if not isinstance(message, RoundClosed):
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
            opened = state.tallies and any(tally.pending for tally in state.tallies.values())
            if opened and state.closed >= 0 and not self.counts["learner died"]:
                assert state.progress.is_trained(state.closed), "nothing is played while a batch trains"

    def _both(self) -> bool:
        state = self.machine.state
        return any(t.pending for t in state.tallies.values()) and any(c.asked for c in state.cohorts.values())


def check(loop: Watched) -> None:
    check_ends(loop)
    check_ages(loop)
    check_failures(loop)
    check_credit(loop)
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


@pytest.mark.parametrize("schedule", ["rolling", "epoch"])
@pytest.mark.parametrize(("delay", "lead", "ahead"), [(3, 0, 0), (3, 2, 1), (0, 1, 2), (4, 1, 0)])
def test_designs_reach_the_age_that_the_recipe_must_allow(
    schedule: str, delay: int, lead: int, ahead: int
) -> None:
    """The bound that a recipe is held to is reached, and never passed."""
    table = {"rounds_per_window": 3, "delay": delay, "lead": lead, "design_ahead": ahead}
    recipe = config(steps=12, curriculum=table | {"schedule": schedule, "environments": 3})
    oldest = 0
    for number in range(8):
        loop = Watched(recipe, random.Random(number), CALM)
        loop.run()
        ages = [
            age
            for batch in loop.history
            for sample, age in zip(batch.selection.samples, batch.selection.ages, strict=True)
            if sample.role == "designer"
        ]
        oldest = max(oldest, *ages)
    assert oldest == recipe.curriculum.oldest_design


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
        recipe = config(
            steps=4,
            curriculum={"reissues": 1, "lead": 1},
            designer={"skills": ["Logic"]},
            learner={"train_hinted": True, "kl": 0.0, "agent": {"max_staleness": 1}},
            reward={"hint_leak": "floor"},
        )
        luck = Luck(scorer_dies=0.05, learner_dies=0.1)
        loop = Watched(recipe, random.Random(number), luck, checkpoint_every=3, servers=2)
        loop.run()
        check(loop)
        counts += loop.counts
        counts["sent twice"] += len(loop.samples) - len(loop.sample_keys)
        counts["servers lost"] += loop.epochs
        counts["stale"] += sum(len(batch.selection.dropped) for batch in loop.history)
        counts["forks"] += len(loop.lineage.forks) - 1
        counts["late"] += loop.machine.state.late
        counts["asked again"] += loop.machine.state.reissued
        scores = [m for m in loop.events if isinstance(m, EnvironmentScored)]
        counts["leaks"] += sum(score.leak for score in scores)
        counts["floored"] += sum(score.state == "degenerate" and not score.leak for score in scores)
        counts["idle designs"] += sum(b.message.designs - b.message.designer_samples for b in loop.history)
        counts["idle groups"] += sum(b.message.zero_variance_groups for b in loop.history)
        counts["uncredited"] += int(loop.buffer.statistics().get("uncredited", 0))
        counts["late samples"] += int(loop.buffer.statistics().get("late", 0))
        counts["truncated"] += sum(
            isinstance(m, EpisodeFinished) and m.outcome == "truncated" for m in loop.events
        )
    never = [name for name, count in counts.items() if not count]
    assert never == []
    assert {"scorer died", "learner died", "redelivered"} <= counts.keys()


# --- Weeks of rounds: what scorer and learner keep does not grow with the age of a run ----------


ROUNDS = 500
LUCK = Luck(scorer_dies=0.002, learner_dies=0.002, server_lost=0.002, crashes=40)


class Sizes(Loop):
    """A loop that notes at each checkpoint how large the scorer's state and the buffer's part of it are."""

    def _save(self) -> None:
        super()._save()
        buffer = len(msgspec.msgpack.encode(self.checkpoint.buffer))
        self.noted.append((len(self.machine.snapshot()), buffer))
        self.checkpoint = msgspec.structs.replace(self.checkpoint, history=())
        self.history.clear()

    noted: list[tuple[int, int]]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["rolling", "epoch"])
def test_state_after_many_rounds_is_as_large_as_after_some(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The versions of the last 512 rounds are kept: with 32 the state is full-grown within this test.
    monkeypatch.setattr("roles.scorer.pacing._ROUNDS_KEPT", 32)
    recipe = config(
        steps=ROUNDS,
        curriculum={"schedule": schedule, "environments": 2, "delay": 3, "hinted_plays": 1, "lead": 1},
        learner={"agent": {"max_staleness": 2, "quota": 3}, "kl": 0.0},
    )
    Sizes.noted = []
    loop = Sizes(recipe, random.Random(4), LUCK, servers=2)
    loop.run(limit=200_000)
    noted = loop.noted
    assert len(noted) >= ROUNDS * 0.8
    assert loop.machine.state.closed == ROUNDS
    assert loop.counts["scorer died"] > 3
    assert loop.counts["learner died"] > 3
    third = len(noted) // 5
    for kind in (0, 1):
        early = max(sizes[kind] for sizes in noted[third : 2 * third])
        late = max(sizes[kind] for sizes in noted[-third:])
        assert late <= 1.2 * early, "flat but for the digits of counts and the forks of the lineage"
    assert len(loop.machine.state.progress.trained) == 32
    assert loop.buffer.state().kept == ()
