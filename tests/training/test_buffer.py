"""The buffer: exactly one terminal state (I1), bounded age (I6), one effect (I7), same batches (I11)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fakes import VOCABULARY, round_closed, sample, sampled, segment
from msgspec.structs import replace

from bus.messages import RoundClosed, Span
from engine.config import RoleTraining
from engine.lineage import Lineage, Version
from engine.training.buffer import Buffer, BufferState, KeptSample, Selection
from engine.training.samples import CreditedSample, Sampled, age, fault, versions

LIMITS: dict[Any, RoleTraining] = {
    "agent": RoleTraining(max_staleness=2),
    "designer": RoleTraining(max_staleness=5),
}


class Named:
    """A buffer whose samples go by the names that a test gives them."""

    def __init__(self, state: BufferState | None = None, capacity: int = 65536, **limits: RoleTraining):
        self.buffer = Buffer(
            {**LIMITS, **limits},
            vocabulary=VOCABULARY,
            capacity=capacity,
            state=state,  # type: ignore[dict-item]
        )
        self.samples: dict[str, CreditedSample] = {}
        self.names: dict[str, str] = {}
        self.sequence = 0

    def admit(self, name: str, **fields: Any) -> str | None:
        one = self.samples.setdefault(name, sample(name, **fields))
        self.sequence += 1
        self.names[sampled(one).sample] = name
        return self.buffer.admit(self.sequence, sampled(one))

    def close(
        self, round_: int, *names: str, current: int = 0, lineage: Lineage | None = None, **closed: Any
    ) -> Selection:
        """Credit the samples of ``names`` and close a round at version ``current``; the batch has names."""
        credits = []
        for name in names:
            one = self.samples.setdefault(name, sample(name))
            self.names[sampled(one).sample] = name
            credits.append(replace(one.credit, sample=sampled(one).sample))
        message = round_closed(round_, credits, **closed)
        found = self.buffer.close(message, Version(0, current), lineage or Lineage())
        dropped = tuple((self.names[one], cause) for one, cause in found.dropped)
        return found._replace(dropped=dropped)

    def trained(self, selection: Selection) -> list[str]:
        return [self.names[one.sample] for one in selection.samples]


def test_a_round_trains_what_it_credits_and_leaves_the_rest() -> None:
    named = Named()
    for name, round_ in (("b", 1), ("a", 0), ("c", 1)):
        assert named.admit(name, round_=round_) is None
    assert named.trained(named.close(0, "a")) == ["a"]
    assert sorted(named.trained(named.close(1, "b", "c", current=1))) == ["b", "c"]


def test_a_design_waits_for_its_credit_while_rounds_pass() -> None:
    named = Named()
    named.admit("design", role="designer", round_=0)
    for round_ in range(3):
        assert not named.close(round_, settled=0, current=round_).samples
    found = named.close(3, "design", settled=1, current=3)
    assert (named.trained(found), found.ages) == (["design"], (3,))


def test_samples_without_credit_leave_with_their_round_or_cohort() -> None:
    named = Named()
    named.admit("flat", round_=0)
    named.admit("later", round_=1)
    named.admit("unpaid", role="designer", round_=0)
    named.admit("open", role="designer", round_=1)
    found = named.close(0, settled=1)
    assert (found.samples, found.dropped, found.missing) == ((), (), 0)
    assert named.buffer.statistics()["uncredited"] == 2
    assert named.buffer.statistics()["held_uncredited"] == 2
    assert [one.sequence for one in named.buffer.state().kept] == [2, 4]


def test_age_is_that_of_the_oldest_token() -> None:
    named = Named()
    named.admit("old", versions=[Version(0, 3), Version(0, 0)])
    named.admit("edge", versions=[Version(0, 1), Version(0, 3)])
    selection = named.close(0, "old", "edge", current=3)
    assert named.trained(selection) == ["edge"]
    assert selection.ages == (2,)
    assert selection.dropped == (("old", "stale"),)


def test_age_runs_through_the_fork() -> None:
    lineage = Lineage().fork(1, 4)
    one = sample("x", versions=[Version(0, 6)])
    assert age(versions(one), Version(1, 5), lineage) == 3


def test_the_largest_advantages_can_come_first() -> None:
    largest = RoleTraining(quota=2, max_staleness=1, priority="largest")
    named = Named(agent=largest)
    for name, value in {"a": 0.1, "b": -2.0, "c": 1.0, "d": -0.5}.items():
        named.admit(name, advantage=value)
    named.admit("later", advantage=9.0, round_=1)
    assert named.trained(named.close(0, *"abcd")) == ["b", "c"]
    assert named.trained(named.close(1, "later", current=1)) == ["later", "d"]
    assert named.close(2, final=True, current=2).dropped == (("a", "stale"),)
    full = Named(agent=largest, capacity=2)
    for name, value in {"a": 1.0, "b": 0.5, "c": -2.0}.items():
        full.admit(name, advantage=value)
    selection = full.close(0, *"abc")
    assert (full.trained(selection), selection.dropped) == (["c", "a"], (("b", "quota"),))


def test_quota_takes_oldest_rounds_first_and_keeps_the_rest() -> None:
    named = Named(agent=RoleTraining(quota=2, max_staleness=9))
    for name in "dcba":
        named.admit(name)
    first = named.close(0, *"abcd")
    assert first.dropped == ()
    named.admit("0", round_=1)
    second = named.close(1, "0", current=1)
    assert sorted(named.trained(first) + named.trained(second)) == list("abcd")
    assert named.trained(named.close(2, final=True, current=2)) == ["0"]


def test_repeated_deliveries_change_nothing() -> None:
    named = Named()
    assert named.admit("a") is None
    assert named.admit("a") == "duplicate"
    assert named.trained(named.close(0, "a")) == ["a"]
    assert named.admit("a") == "late"
    assert named.close(1, current=1) == Selection((), (), (), 0)
    assert named.buffer.statistics()["duplicate"] == 1


def test_work_that_is_done_twice_is_trained_once() -> None:
    """The fact names one of the two plays; the tokens of the other never get a credit."""
    buffer = Buffer(LIMITS, vocabulary=VOCABULARY)
    plays = [sample("play", tokens=tokens) for tokens in (3, 5)]
    for sequence, play in enumerate(plays, start=1):
        assert buffer.admit(sequence, sampled(play)) is None
    second = sampled(plays[1])
    closed = round_closed(0, [replace(plays[1].credit, sample=second.sample)])
    selection = buffer.close(closed, Version(0, 0), Lineage())
    assert [one.segments for one in selection.samples] == [second.segments]
    assert buffer.statistics()["uncredited"] == 1


def test_samples_behind_their_round_or_cohort_are_late() -> None:
    named = Named()
    named.close(0)
    assert named.admit("a") == "late"
    assert named.admit("b", role="designer", round_=0) == "late"
    assert named.admit("c", role="designer", round_=1) is None
    assert named.close(1, current=1).dropped == ()
    assert named.buffer.statistics()["late"] == 2
    assert named.buffer.state().kept == ()


def test_a_credit_without_its_sample_is_missing() -> None:
    named = Named()
    named.admit("a")
    selection = named.close(0, "a", "never came")
    assert (named.trained(selection), selection.missing) == (["a"], 1)
    assert selection.dropped == (("never came", "lost"),)
    assert named.buffer.statistics()["missing"] == 1


def test_samples_without_a_sampled_token_do_not_wait() -> None:
    named = Named()
    assert named.admit("empty", segments=[segment([1, 2], [0, 0])]) == "empty"
    assert named.admit("text", role="designer", segments=()) == "empty"
    assert named.buffer.state().kept == ()


def test_a_malformed_sample_is_dropped_with_its_credit() -> None:
    named = Named()
    assert named.admit("bad", segments=[segment([1, VOCABULARY], [0, 1])]) == "malformed"
    named.admit("unpaid", segments=[segment([1, -1], [0, 1])])
    named.admit("nan", advantage=float("nan"))
    selection = named.close(0, "bad", "nan")
    assert selection.dropped == (("bad", "malformed"), ("nan", "malformed"))
    assert named.buffer.statistics()["uncredited"] == 1


def test_capacity_drops_the_oldest_round() -> None:
    named = Named(capacity=2, agent=RoleTraining(quota=1, max_staleness=9))
    for name in "ab":
        named.admit(name)
    first = named.trained(named.close(0, "a", "b"))
    for name in "cd":
        named.admit(name, round_=1)
    selection = named.close(1, "c", "d", current=1)
    (waited,) = {"a", "b"} - set(first)
    assert selection.dropped == ((waited, "quota"),)
    assert named.trained(selection)[0] in "cd"


def test_a_closed_round_is_not_formed_again() -> None:
    named = Named()
    for round_ in (0, 1, 2, 4):
        named.close(round_)
    assert named.buffer.state().closed == ((0, 2), (4, 4))
    with pytest.raises(ValueError, match="closed already"):
        named.close(4)


def test_samples_that_the_stream_lost_are_named() -> None:
    before = Named(agent=RoleTraining(quota=1, max_staleness=9))
    for name in "ab":
        before.admit(name)
    first = before.trained(before.close(0, "a", "b"))
    before.admit("waits", round_=1)
    state = before.buffer.state()
    (carried,) = {"a", "b"} - set(first)
    assert [before.names[one.sample] for one in state.kept] == [carried, "waits"]
    assert [one.credit is None for one in state.kept] == [False, True]
    after = Named(state)
    after.names = before.names
    for one in state.kept:
        after.buffer.restore(one, None)
    selection = after.close(1, "waits", current=1)
    assert selection.dropped == ((carried, "lost"), ("waits", "lost"))
    assert selection.missing == 1


def test_lengths_generated_and_trained_are_compared() -> None:
    """The generated lengths are those the scorer reports as sampled, masked and flat plays included."""
    named = Named()
    named.admit("short", tokens=2)
    named.admit("long", tokens=20)
    named.admit("stale", tokens=50, versions=[Version(0, 9)])
    named.close(0, "short", "long", "stale", play_tokens=(2, 20, 50, 400))
    gauges = named.buffer.statistics()
    assert named.buffer.lengths().items() <= gauges.items()
    assert gauges["generated_agent_mean_tokens"] == 118
    assert gauges["trained_agent_mean_tokens"] == 11
    assert gauges["generated_agent_under_64"] == gauges["generated_agent_under_512"] == 1
    assert "trained_agent_under_64" not in gauges


def test_a_power_of_two_is_not_below_itself() -> None:
    named = Named()
    named.close(0, play_tokens=(31, 32))
    gauges = named.buffer.lengths()
    assert (gauges["generated_agent_under_32"], gauges["generated_agent_under_64"]) == (1, 1)


@pytest.mark.parametrize(
    "part",
    [
        segment([1, VOCABULARY], [0, 1]),
        segment([1, -1], [0, 1]),
        segment([1, 2], [1, 1]),
        segment([1, 2], [0, 1], [0.0, float("-inf")]),
        segment([1, 2], [0, 1], [0.0, 0.5]),
        segment([1, 2], [0, 1, 1]),
        replace(segment([1, 2], [0, 1]), tokens=b"odd"),
    ],
)
def test_malformed_samples_are_refused(part: Any) -> None:
    assert fault(sampled(sample("x", segments=[part])), VOCABULARY) == "malformed"


def test_spans_must_fit_the_tokens() -> None:
    whole = segment([1, 2, 3], [0, 1, 1])
    for spans in ((), (Span(0, 1, 2),), (Span(0, 1, 4),), (Span(0, 1, 3), Span(0, 2, 3)), (Span(0, 2, 1),)):
        other = replace(whole, spans=spans)
        assert fault(sampled(sample("x", segments=[other])), VOCABULARY) == "malformed"
    assert fault(sampled(sample("x", segments=[segment([1, 2], [0, 0])])), VOCABULARY) == "empty"
    assert fault(sampled(sample("x")), VOCABULARY) is None


Event = Sampled | RoundClosed


@st.composite
def streams(draw: st.DrawFn) -> list[Event]:
    """Rounds in order, each preceded by its samples; later rounds' samples, repeats and garbage mixed in."""
    events: list[Event] = []
    waiting: list[CreditedSample] = []
    for round_ in range(draw(st.integers(1, 5))):
        for index in range(draw(st.integers(0, 6))):
            role = draw(st.sampled_from(["agent", "designer"]))
            steps = draw(st.lists(st.integers(0, 6), min_size=1, max_size=2))
            one = sample(
                f"{role}-{round_}-{index}",
                role=role,
                round_=round_ + draw(st.integers(0, 1)),
                versions=[Version(0, step) for step in steps],
                tokens=draw(st.integers(1, 9)),
            )
            waiting.append(one)
            events.append(sampled(one))
        events += draw(st.lists(st.sampled_from(events), max_size=2)) if events else []
        credits = [
            replace(one.credit, sample=sampled(one).sample)
            for one in waiting
            if one.round == round_ and draw(st.integers(0, 4))
        ]
        events.append(round_closed(round_, credits))
    last = [replace(one.credit, sample=sampled(one).sample) for one in waiting if one.round > round_]
    events.append(round_closed(99, last, final=True))
    return events


def play(
    events: list[Event], quota: int, cut: int | None = None
) -> tuple[list[Selection], list[Version], Buffer]:
    """Feed a buffer; at ``cut`` go on with one restored from its state, as a restarted learner does."""
    limits: Any = {"agent": RoleTraining(quota=quota, max_staleness=2), "designer": LIMITS["designer"]}
    buffer, current = Buffer(limits, vocabulary=VOCABULARY), Version(0, 0)
    selections, currents = [], []
    for position, event in enumerate(events, start=1):
        if not isinstance(event, RoundClosed):
            buffer.admit(position, event)
        elif not buffer.closed(event.round):
            selections.append(buffer.close(event, current, Lineage()))
            currents.append(current)
            current = Version(0, current.step + bool(selections[-1].samples))
        if position == cut:
            state = buffer.state()
            buffer = Buffer(limits, vocabulary=VOCABULARY, state=state)
            for one in state.kept:
                kept = events[one.sequence - 1]
                assert not isinstance(kept, RoundClosed)
                buffer.restore(one, kept)
    return selections, currents, buffer


@settings(max_examples=150, deadline=None)
@given(streams(), st.integers(0, 3))
def test_every_sample_has_one_terminal_state_and_a_bounded_age(events: list[Event], quota: int) -> None:
    selections, currents, buffer = play(events, quota)
    ends = Counter[str]()
    for selection, current in zip(selections, currents, strict=True):
        ends.update(one.sample for one in selection.samples)
        ends.update(name for name, _ in selection.dropped)
        assert selection.missing == 0
        for one, old in zip(selection.samples, selection.ages, strict=True):
            bound = 2 if one.role == "agent" else 5
            assert old == max(abs(current.step - version.step) for version in versions(one)) <= bound
        if quota:
            assert sum(one.role == "agent" for one in selection.samples) <= quota
    credited = {
        credit.sample for event in events if isinstance(event, RoundClosed) for credit in event.credits
    }
    assert ends == Counter(dict.fromkeys(credited, 1))
    assert buffer.state().kept == ()
    stored = {event.sample for event in events if not isinstance(event, RoundClosed)}
    assert buffer.statistics().get("uncredited", 0) == len(stored - credited)


@settings(max_examples=100, deadline=None)
@given(streams(), st.integers(0, 3), st.data())
def test_same_events_same_batches_across_a_restart(
    events: list[Event], quota: int, data: st.DataObject
) -> None:
    whole = play(events, quota)[0]
    cut = data.draw(st.integers(1, len(events)))
    assert play(events, quota, cut)[0] == whole


def test_a_kept_sample_is_known_by_its_place_and_its_id() -> None:
    one = sampled(sample("a"))
    buffer = Buffer(LIMITS, vocabulary=VOCABULARY)
    buffer.restore(KeptSample(4, one.sample), sampled(sample("another", tokens=9)))
    assert buffer.state().kept == ()
    buffer.restore(KeptSample(4, one.sample), one)
    assert buffer.state().kept == (KeptSample(4, one.sample),)
