"""When an evaluator plays what."""

from hypothesis import given
from hypothesis import strategies as st

from bus.messages import BatchTrained, EvaluationFinished, ServerLost, ServerServing
from engine.lineage import Version
from roles.evaluator.agenda import Agenda


def serving(step: int, *, fence: int = 0, server: str = "s0", epoch: str = "e") -> ServerServing:
    version = Version(fence, step).pack()
    return ServerServing(
        server=server, epoch=epoch, url="http://x", version=version, canary_error=0.0, seconds=0.0
    )


def finished(suite: str, step: int) -> EvaluationFinished:
    return EvaluationFinished(
        suite=suite,
        step=step,
        version=step,
        version_high=step,
        episodes=1,
        win=0.0,
        stderr=0.0,
        by_family={},
        seconds=0.0,
    )


def trained(step: int, *, final: bool, fence: int = 0) -> BatchTrained:
    return BatchTrained(
        round=step,
        step=step,
        version=Version(fence, step).pack(),
        trained=(),
        dropped=(),
        agent_samples=0,
        designer_samples=0,
        max_staleness=0,
        mean_staleness=0.0,
        metrics={},
        seconds=0.0,
        final=final,
    )


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


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 6))
def test_no_suite_is_played_twice_at_a_step_and_each_mark_once(growth: list[int], every: int) -> None:
    agenda = Agenda(["mid", "hard"], every)
    step, played = 0, []
    for grown in growth:
        step += grown
        agenda.note(serving(step))
        for _ in range(5):
            due = agenda.due()
            if due is None:
                break
            played.append(due)
            agenda.note(finished(*due))
        else:
            raise AssertionError("the agenda does not come to rest")
    assert len(set(played)) == len(played)
    marks = [(suite, at // every) for suite, at in played]
    assert len(set(marks)) == len(marks)
