"""When an evaluator plays what."""

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from scenes import small_run
from scenes.small_run import policy, serving

from bus.messages import BatchTrained, EvaluationFinished, Message, ServerLost
from engine.lineage import Lineage, Version
from roles.evaluator.agenda import KEPT, Agenda


def finished(
    suite: str, step: int, fence: int = 0, *, low: Version | None = None, high: Version | None = None
) -> EvaluationFinished:
    low, high = low or Version(fence, step), high or Version(fence, step)
    fact = small_run.evaluation(step, fence, suite)
    return msgspec.structs.replace(fact, version=low.pack(), version_high=high.pack())


def trained(step: int, *, final: bool, fence: int = 0) -> BatchTrained:
    return small_run.batch(step, step, fence, final=final)


def test_nothing_is_due_without_a_server() -> None:
    assert Agenda(["mid"], 10).due() is None


def test_step_zero_every_tenth_and_the_last() -> None:
    agenda = Agenda(["mid"], 10)
    played = []
    for step in range(24):
        agenda.note(serving(step))
        if step == 23:
            agenda.note(trained(23, final=True))
        while (due := agenda.due()) is not None:
            played.append(due)
            agenda.note(finished(*due))
    assert played == [("mid", 0), ("mid", 10), ("mid", 20), ("mid", 23)]


def test_every_zero_leaves_the_first_and_the_last() -> None:
    agenda = Agenda(["mid"], 0)
    agenda.note(serving(0))
    assert agenda.due() == ("mid", 0)
    agenda.note(finished("mid", 0))
    agenda.note(serving(7))
    assert agenda.due() is None
    agenda.note(trained(7, final=True))
    assert agenda.due() == ("mid", 7)


def test_an_overtaken_step_is_played_under_its_true_name_once() -> None:
    agenda = Agenda(["mid", "hard"], 10)
    agenda.note(serving(0))
    agenda.note(finished("mid", 0))
    agenda.note(serving(13))
    assert agenda.due() == ("mid", 13)
    agenda.note(finished("mid", 13))
    assert agenda.due() == ("hard", 13)
    agenda.note(finished("hard", 13))
    agenda.note(serving(17))
    assert agenda.due() is None


def test_an_earlier_life_is_not_repeated() -> None:
    agenda = Agenda(["mid"], 10)
    for fact in (finished("mid", 0), finished("other", 10), serving(10), finished("mid", 10)):
        agenda.note(fact)
    assert agenda.due() is None


def test_the_slowest_server_counts_and_a_lost_one_does_not() -> None:
    agenda = Agenda(["mid"], 10)
    agenda.note(serving(10, server="a"))
    agenda.note(serving(9, server="b", epoch="old"))
    agenda.note(finished("mid", 0))
    assert agenda.due() is None
    agenda.note(ServerLost(server="b", epoch="older", reason=""))
    assert agenda.due() is None
    agenda.note(ServerLost(server="b", epoch="old", reason=""))
    assert agenda.due() == ("mid", 10)


def test_the_last_step_waits_for_the_surviving_lineage() -> None:
    agenda = Agenda(["mid"], 10)
    agenda.note(finished("mid", 20))
    agenda.note(serving(24))
    agenda.note(trained(23, final=True, fence=1))
    assert agenda.due() is None
    agenda.note(serving(23, fence=1))
    assert agenda.due() == ("mid", 23)


def test_a_run_that_goes_on_after_its_end_is_not_at_its_end() -> None:
    agenda = Agenda(["mid"], 10)
    for fact in (serving(5), trained(5, final=True), finished("mid", 5)):
        agenda.note(fact)
    assert agenda.due() is None
    agenda.note(trained(6, final=False, fence=1))
    agenda.note(serving(6, fence=1))
    assert agenda.due() is None
    agenda.note(serving(10, fence=1))
    assert agenda.due() == ("mid", 10)


def test_what_an_abandoned_branch_answered_is_asked_again() -> None:
    agenda = Agenda(["mid"], 10)
    for step in (0, 10, 20, 30):
        agenda.note(finished("mid", step))
    agenda.note(serving(31))
    assert agenda.due() is None
    agenda.note(policy(16, 1))
    assert agenda.due() is None, "nobody wants to know about weights that are gone"
    agenda.note(serving(16, fence=1))
    assert agenda.due() is None, "step 10 was before the fork"
    agenda.note(serving(31, fence=1))
    assert agenda.due() == ("mid", 31)
    assert agenda.wants(finished("mid", 30, 1))
    assert not agenda.wants(finished("mid", 10, 1)), "the same weights as before the fork"
    assert not agenda.wants(finished("mid", 30))
    agenda.note(finished("mid", 31, 1))
    assert agenda.due() is None


def test_weights_of_two_branches_are_no_evaluation() -> None:
    agenda = Agenda(["mid"], 10)
    agenda.note(policy(16, 1))
    mixed = finished("mid", 16, low=Version(0, 16), high=Version(1, 17))
    assert not agenda.wants(mixed), "0@17 may have answered too"
    assert agenda.wants(finished("mid", 16, low=Version(1, 16), high=Version(1, 17)))
    half_gone = finished("mid", 15, low=Version(0, 15), high=Version(0, 17))
    assert not agenda.wants(half_gone)
    agenda.note(serving(17, fence=1))
    agenda.note(half_gone)
    assert agenda.due() == ("mid", 17)
    agenda.note(mixed)
    assert agenda.due() is None, "an older build has published it: both ends survive"


def test_an_end_that_was_abandoned_is_no_end() -> None:
    agenda = Agenda(["mid"], 10)
    for fact in (trained(23, final=True), finished("mid", 20), policy(20, 1), serving(21, fence=1)):
        agenda.note(fact)
    assert agenda.due() is None


def test_memory_does_not_grow_with_the_run() -> None:
    agenda = Agenda(["mid"], 1)
    for step in range(3 * KEPT):
        agenda.note(finished("mid", step))
    assert len(agenda._done["mid"]) == KEPT
    agenda.note(policy(KEPT, 1))
    agenda.note(serving(KEPT, fence=1))
    assert agenda.due() == ("mid", KEPT), "forgotten: it is asked again"


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, int, list[int]]]:
    """Lives of learners: (fence, step where it starts, how many steps each of its servers' updates makes)."""
    made, step, fence = [], 0, 0
    for _ in range(draw(st.integers(1, 5))):
        grown = draw(st.lists(st.integers(0, 4), max_size=15))
        made.append((fence, step, grown))
        end = step + sum(grown)
        step = draw(st.integers(0, end))
        fence += draw(st.integers(1, 3))
    return made


@given(lives(), st.integers(0, 6), st.sets(st.integers(0, 60)))
def test_each_mark_is_answered_once_by_weights_that_survive(
    run: list[tuple[int, int, list[int]]], every: int, missed: set[int]
) -> None:
    """Whatever the learners do: at rest the newest mark has exactly one answer along the lineage."""
    agenda, lineage = Agenda(["mid", "hard"], every), Lineage()
    played: list[tuple[str, Version]] = []
    moment = 0
    for fence, start, grown in run:
        if fence:
            lineage = lineage.fork(fence, start)
        agenda.note(policy(start, fence))
        if played and not lineage.survives(agenda.serving or Version(0, 0)):
            assert agenda.due() is None
        step = start
        for more in (0, *grown):
            step += more
            agenda.note(policy(step, fence))
            agenda.note(serving(step, fence=fence))
            moment += 1
            if moment in missed:
                continue
            for _ in range(3):
                due = agenda.due()
                if due is None:
                    break
                suite, at = due
                fact = finished(suite, at, fence)
                assert at == step
                assert agenda.wants(fact)
                played.append((suite, Version(fence, at)))
                agenda.note(fact)
                assert not agenda.wants(fact)
            else:
                raise AssertionError("the agenda does not come to rest")
            mark = step - step % every if every else 0
            for suite in ("mid", "hard"):
                answers = [
                    version
                    for name, version in played
                    if name == suite and lineage.survives(version) and mark <= version.step <= step
                ]
                assert len(answers) == 1
    assert len(set(played)) == len(played)


@given(lives(), st.integers(0, 6), st.randoms(use_true_random=False), st.booleans())
def test_what_is_known_does_not_depend_on_the_order_of_the_facts(
    run: list[tuple[int, int, list[int]]], every: int, shuffle: random.Random, from_state: bool
) -> None:
    """A later life hears of forks before or after what was evaluated, from the state or from the facts."""
    forks = [policy(start, fence) for fence, start, _ in run]
    results: list[Message] = [
        finished("mid", step, fence)
        for fence, start, grown in run
        for step in range(start, start + sum(grown) + 1)
        if step % 3 == 0
    ][:KEPT]
    lineage = Lineage()
    for fence, start, _ in run[1:]:
        lineage = lineage.fork(fence, start)
    fence, start, grown = run[-1]
    now = serving(start + sum(grown), fence=fence)
    first, later = Agenda(["mid"], every), Agenda(["mid"], every)
    for fact in (*results, *forks, now):
        first.note(fact)
    if from_state:
        later.settle(lineage)
    facts = [*results, now]
    shuffle.shuffle(facts)
    for fact in facts if from_state else (*forks, *facts):
        later.note(fact)
    survivors = set(first._done["mid"])
    assert survivors == set(later._done["mid"])
    assert all(lineage.survives(done.low) for done in survivors)
    assert first.due() == later.due()
