"""The buffer: exactly one terminal state (I1), bounded age (I6), one effect (I7), same batches (I11)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fakes import VOCABULARY, round_closed, sample, segment

from bus.messages import RoundClosed, SampleReady
from engine.config import RoleTraining
from engine.lineage import Lineage, Version
from engine.training.buffer import Buffer, BufferState, Selection
from engine.training.ledger import Ledger
from engine.training.samples import age, fault, versions

LIMITS: dict[Any, RoleTraining] = {
    "agent": RoleTraining(max_staleness=2),
    "designer": RoleTraining(max_staleness=5),
}


def make(state: BufferState | None = None, **limits: RoleTraining) -> Buffer:
    return Buffer({**LIMITS, **limits}, vocabulary=VOCABULARY, state=state)


def names(selection: Selection) -> list[str]:
    return [one.sample for one in selection.samples]


def test_a_round_takes_its_own_and_older_samples_and_leaves_later_ones():
    buffer = make()
    for sequence, (name, round_) in enumerate([("b", 1), ("a", 0), ("c", 1)], start=1):
        assert buffer.admit(sequence, sample(name, round_=round_)) is None
    assert names(buffer.close(round_closed(0), Version(0, 0), Lineage())) == ["a"]
    assert names(buffer.close(round_closed(1), Version(0, 1), Lineage())) == ["b", "c"]


def test_age_is_that_of_the_oldest_token():
    buffer = make()
    buffer.admit(1, sample("old", versions=[Version(0, 3), Version(0, 0)]))
    buffer.admit(2, sample("edge", versions=[Version(0, 1), Version(0, 3)]))
    selection = buffer.close(round_closed(0), Version(0, 3), Lineage())
    assert names(selection) == ["edge"]
    assert selection.ages == (2,)
    assert selection.dropped == (("old", "stale"),)


def test_age_runs_through_the_fork():
    lineage = Lineage().fork(1, 4)
    one = sample("x", versions=[Version(0, 6)])
    assert age(versions(one), Version(1, 5), lineage) == 3


def test_the_largest_advantages_can_come_first():
    largest = RoleTraining(quota=2, max_staleness=1, priority="largest")
    buffer = make(agent=largest)
    for sequence, (name, value) in enumerate({"a": 0.1, "b": -2.0, "c": 1.0, "d": -0.5}.items(), start=1):
        buffer.admit(sequence, sample(name, advantage=value))
    buffer.admit(5, sample("later", advantage=9.0, round_=1))
    assert names(buffer.close(round_closed(0), Version(0, 0), Lineage())) == ["b", "c"]
    assert names(buffer.close(round_closed(1), Version(0, 1), Lineage())) == ["later", "d"]
    last = buffer.close(round_closed(2, final=True), Version(0, 2), Lineage())
    assert last.dropped == (("a", "stale"),)
    full = Buffer({**LIMITS, "agent": largest}, vocabulary=VOCABULARY, capacity=2)
    for sequence, (name, value) in enumerate({"a": 1.0, "b": 0.5, "c": -2.0}.items(), start=1):
        full.admit(sequence, sample(name, advantage=value))
    selection = full.close(round_closed(0), Version(0, 0), Lineage())
    assert (names(selection), selection.dropped) == (["c", "a"], (("b", "quota"),))


def test_late_samples_leave_no_trace_in_the_counts_of_rounds():
    """A closed round is not counted again: over weeks such entries would pile up in every checkpoint."""
    buffer = make()
    for round_ in range(200):
        buffer.close(round_closed(round_), Version(0, round_), Lineage())
        buffer.admit(round_, sample(f"late-{round_}", round_=round_))
    assert buffer.state().arrived == {}
    assert buffer.statistics()["dropped_late"] == 200


def test_quota_takes_oldest_rounds_first_and_keeps_the_rest():
    buffer = make(agent=RoleTraining(quota=2, max_staleness=9))
    for sequence, name in enumerate("dcba", start=1):
        buffer.admit(sequence, sample(name))
    first = buffer.close(round_closed(0), Version(0, 0), Lineage())
    assert names(first) == ["a", "b"]
    assert first.dropped == ()
    buffer.admit(5, sample("0", round_=1))
    assert names(buffer.close(round_closed(1), Version(0, 1), Lineage())) == ["c", "d"]
    last = buffer.close(round_closed(2, final=True), Version(0, 2), Lineage())
    assert names(last) == ["0"]


def test_the_final_round_leaves_nothing_behind():
    buffer = make(agent=RoleTraining(quota=1))
    buffer.admit(1, sample("a"))
    buffer.admit(2, sample("b"))
    selection = buffer.close(round_closed(0, final=True), Version(0, 0), Lineage())
    assert names(selection) == ["a"]
    assert selection.dropped == (("b", "quota"),)
    assert buffer.state().kept == ()
    ahead = make()
    ahead.admit(1, sample("a", round_=7))
    assert names(ahead.close(round_closed(3, final=True), Version(0, 0), Lineage())) == ["a"]


def test_repeated_deliveries_change_nothing():
    buffer = make()
    assert buffer.admit(1, sample("a")) is None
    assert buffer.admit(2, sample("a")) == "duplicate"
    selection = buffer.close(round_closed(0), Version(0, 0), Lineage())
    assert buffer.admit(3, sample("a")) == "duplicate"
    assert names(selection) == ["a"]
    assert buffer.close(round_closed(1), Version(0, 1), Lineage()).dropped == ()
    assert buffer.statistics()["duplicate"] == 2


def test_a_sample_behind_its_round_is_dropped_as_late_once():
    buffer = make()
    buffer.close(round_closed(0), Version(0, 0), Lineage())
    assert buffer.admit(1, sample("a")) == "late"
    assert buffer.admit(2, sample("a")) == "duplicate"
    assert buffer.close(round_closed(1), Version(0, 0), Lineage()).dropped == (("a", "late"),)


def test_missing_samples_are_counted():
    buffer = make()
    buffer.admit(1, sample("a"))
    buffer.admit(2, sample("b", segments=[segment([1, 2], [0, 0])]))
    assert buffer.close(round_closed(0, agents=3), Version(0, 0), Lineage()).missing == 1
    assert buffer.state().arrived == {}
    buffer.admit(3, sample("c", round_=1))
    buffer.admit(4, sample("d", round_=1))
    assert buffer.close(round_closed(1, agents=1), Version(0, 0), Lineage()).missing == 0
    assert buffer.statistics()["missing"] == 1


def test_what_arrived_before_a_restart_is_not_missing():
    before = make()
    before.admit(1, sample("a"))
    before.admit(2, sample("b"))
    after = make(before.state())
    after.restore(1, "a", sample("a"))
    after.restore(2, "b", sample("b"))
    selection = after.close(round_closed(0, agents=3), Version(0, 0), Lineage())
    assert (names(selection), selection.missing) == (["a", "b"], 1)


def test_capacity_drops_the_oldest_round():
    buffer = Buffer(LIMITS, vocabulary=VOCABULARY, capacity=2)
    for sequence, round_ in enumerate([1, 0, 2], start=1):
        buffer.admit(sequence, sample(f"s{round_}", round_=round_))
    selection = buffer.close(round_closed(2), Version(0, 0), Lineage())
    assert names(selection) == ["s1", "s2"]
    assert selection.dropped == (("s0", "quota"),)


def test_a_closed_round_is_not_formed_again():
    buffer = make()
    buffer.close(round_closed(3), Version(0, 0), Lineage())
    with pytest.raises(ValueError, match="closed already"):
        buffer.close(round_closed(3), Version(0, 0), Lineage())


def test_what_the_stream_lost_is_said():
    buffer = make(BufferState(kept=((4, "a"), (5, "b"), (6, "c"))))
    buffer.restore(4, "a", sample("a"))
    buffer.restore(5, "b", None)
    buffer.restore(6, "c", sample("another"))
    selection = buffer.close(round_closed(0), Version(0, 0), Lineage())
    assert names(selection) == ["a"]
    assert selection.dropped == (("b", "lost"), ("c", "lost"))


def test_lengths_generated_and_trained_are_compared():
    buffer = make()
    buffer.admit(1, sample("short", tokens=2))
    buffer.admit(2, sample("long", tokens=20, versions=[Version(0, 0)]))
    buffer.admit(3, sample("stale", tokens=50, versions=[Version(0, 9)]))
    buffer.close(round_closed(0), Version(0, 0), Lineage())
    gauges = buffer.statistics()
    assert buffer.lengths().items() <= gauges.items()
    assert gauges["generated_agent_mean_tokens"] == 24
    assert gauges["trained_agent_mean_tokens"] == 11
    assert gauges["generated_agent_under_64"] == 1
    assert "trained_agent_under_64" not in gauges


def test_a_power_of_two_is_not_below_itself():
    buffer = make()
    for sequence, tokens in enumerate((31, 32), start=1):
        buffer.admit(sequence, sample(str(tokens), tokens=tokens))
    gauges = buffer.lengths()
    assert (gauges["generated_agent_under_32"], gauges["generated_agent_under_64"]) == (1, 1)


@pytest.mark.parametrize(
    "one",
    [
        sample("x", advantage=float("nan")),
        sample("x", segments=[segment([1, VOCABULARY], [0, 1])]),
        sample("x", segments=[segment([1, -1], [0, 1])]),
        sample("x", segments=[segment([1, 2], [1, 1])]),
        sample("x", segments=[segment([1, 2], [0, 1], [0.0, float("-inf")])]),
        sample("x", segments=[segment([1, 2], [0, 1], [0.0, 0.5])]),
        sample("x", segments=[segment([1, 2, 3], [0, 1])]),
    ],
)
def test_malformed_samples_are_refused(one: SampleReady):
    assert fault(one, VOCABULARY) == "malformed"


def test_spans_must_cover_the_mask():
    whole = segment([1, 2, 3], [0, 1, 1])
    bare = type(whole)(tokens=whole.tokens, mask=whole.mask, logprobs=whole.logprobs, spans=())
    assert fault(sample("x", segments=[bare]), VOCABULARY) == "malformed"
    assert fault(sample("x", segments=[segment([1, 2], [0, 0])]), VOCABULARY) == "empty"
    assert fault(sample("x"), VOCABULARY) is None


def test_ledger_forgets_ids_but_no_round():
    ledger = Ledger(keep=2)
    for round_ in (0, 1, 2, 4):
        ledger.close(round_, [f"s{round_}"])
    assert ledger.state().closed == ((0, 2), (4, 4))
    assert len(ledger) == 2
    assert ledger.verdict("s0", 0) == "duplicate"
    assert ledger.verdict("s4", 4) == "duplicate"
    assert ledger.verdict("new", 2) == "late"
    assert ledger.verdict("new", 3) is None


Event = SampleReady | RoundClosed


@st.composite
def streams(draw: st.DrawFn) -> list[Event]:
    """Rounds in order, each preceded by its samples; later rounds' samples, repeats and garbage mixed in."""
    events: list[Event] = []
    for round_ in range(draw(st.integers(1, 5))):
        for index in range(draw(st.integers(0, 6))):
            role = draw(st.sampled_from(["agent", "designer"]))
            steps = draw(st.lists(st.integers(0, 6), min_size=1, max_size=2))
            events.append(
                sample(
                    f"{role}-{round_}-{index}",
                    role=role,
                    round_=round_ + draw(st.integers(0, 1)),
                    versions=[Version(0, step) for step in steps],
                    tokens=draw(st.integers(0, 9)),
                )
            )
        events += draw(st.lists(st.sampled_from(events), max_size=2)) if events else []
        events.append(round_closed(round_))
    events.append(round_closed(99, final=True))
    return events


def play(
    events: list[Event], quota: int, cut: int | None = None
) -> tuple[list[Selection], list[Version], Buffer]:
    """Feed a buffer; at ``cut`` go on with one restored from its state, as a restarted learner does."""
    limits = {"agent": RoleTraining(quota=quota, max_staleness=2), "designer": LIMITS["designer"]}
    buffer, current = make(None, **limits), Version(0, 0)
    selections, currents = [], []
    for position, event in enumerate(events, start=1):
        if isinstance(event, SampleReady):
            buffer.admit(position, event)
        elif not buffer.closed(event.round):
            selections.append(buffer.close(event, current, Lineage()))
            currents.append(current)
            current = Version(0, current.step + bool(selections[-1].samples))
        if position == cut:
            state = buffer.state()
            buffer = make(state, **limits)
            for sequence, name in state.kept:
                kept = events[sequence - 1]
                assert isinstance(kept, SampleReady)
                buffer.restore(sequence, name, kept)
    return selections, currents, buffer


@settings(max_examples=150, deadline=None)
@given(streams(), st.integers(0, 3))
def test_every_sample_has_one_terminal_state_and_a_bounded_age(events: list[Event], quota: int):
    selections, currents, buffer = play(events, quota)
    ends = Counter[str]()
    for selection, current in zip(selections, currents, strict=True):
        ends.update(names(selection))
        ends.update(name for name, _ in selection.dropped)
        for one, old in zip(selection.samples, selection.ages, strict=True):
            bound = 2 if one.role == "agent" else 5
            assert old == max(abs(current.step - version.step) for version in versions(one)) <= bound
        if quota:
            assert sum(one.role == "agent" for one in selection.samples) <= quota
    sent = {event.sample for event in events if isinstance(event, SampleReady)}
    assert ends == Counter(dict.fromkeys(sent, 1))
    assert buffer.state().kept == ()


@settings(max_examples=100, deadline=None)
@given(streams(), st.integers(0, 3), st.data())
def test_same_events_same_batches_across_a_restart(events: list[Event], quota: int, data: st.DataObject):
    whole = play(events, quota)[0]
    cut = data.draw(st.integers(1, len(events)))
    assert play(events, quota, cut)[0] == whole
