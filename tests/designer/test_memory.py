"""The designer's memory."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scenes import small_run

from bus.messages import EnvironmentReady, EnvironmentScored, EnvironmentStanding, Message, RoundSummary
from roles.designer.memory import Memory, MemoryState

STATES = ("fresh", "frontier", "mastered", "intractable", "degenerate")


def ready(number: int, *, program: int | None = None, **fields: Any) -> EnvironmentReady:
    program = number if program is None else program
    values = {
        "skill": "Logic", "environment": f"e{program}", "source": f"class Game{program}Env: ...",
        "hint": None, "document": f"doc{number}", "title": f"Game {number}", "trivial_win_rate": 0.0,
    }  # fmt: skip
    return small_run.ready(f"d{number}", slot=number, **(values | fields))


def scored(number: int, *, program: int | None = None, **fields: Any) -> EnvironmentScored:
    values = {
        "skill": "Logic", "environment": f"e{number if program is None else program}", "plays": 8,
        "document": f"doc{number}", "hinted_plays": 8, "win_low": 0.0, "win_high": 1.0, "hinted": None,
        "regret": 0.2, "regret_low": None, "regret_high": None, "noise_floor": None,
    }  # fmt: skip
    return small_run.scored(f"d{number}", 4, **(values | fields))


def played(*standings: EnvironmentStanding) -> RoundSummary:
    return small_run.summary(1, standings=standings)


def standing(number: int, state: Any, *, program: int | None = None, **fields: Any) -> EnvironmentStanding:
    environment = f"e{number if program is None else program}"
    values = {"plays": 4, "win": 0.5, "win_low": 0.2, "win_high": 0.8, **fields}
    return EnvironmentStanding(design=f"d{number}", environment=environment, state=state, **values)


@pytest.mark.parametrize("state", ["mastered", "intractable"])
def test_an_interval_without_width_decides_nothing(state: Any) -> None:
    """It says that nothing was computed, or that all plays agreed: not that the next one would."""
    memory = Memory(10)
    memory.ready(ready(1))
    memory.played(played(standing(1, state, win=1.0, win_low=1.0, win_high=1.0)))
    assert memory.states() == {"fresh": 1}
    remember(memory, 1, state=state, win=1.0, win_low=1.0, win_high=1.0)
    assert memory.states() == {"fresh": 1}
    assert examples(memory) == []
    remember(memory, 2, state=state, win=1.0, win_low=0.7, win_high=1.0)
    (negative,) = examples(memory)
    assert negative["state"] == state
    assert "(95 % interval 70-100 %)" in negative["why"]


def tell(memory: Memory, fact: Message) -> None:
    match fact:
        case EnvironmentReady():
            memory.ready(fact)
        case EnvironmentScored():
            memory.scored(fact)
        case RoundSummary():
            memory.played(fact)


def remember(memory: Memory, number: int, **fields: Any) -> None:
    memory.ready(ready(number, skill=fields.get("skill", "Logic")))
    memory.scored(scored(number, **fields))


def titles(views: list[dict[str, Any]], polarity: str) -> list[str]:
    return [view["title"] for view in views if view["polarity"] == polarity]


def examples(
    memory: Memory,
    *,
    seed: int = 0,
    positive: int = 50,
    negative: int = 50,
    tokens: Callable[[str], int] = len,
    limit: int = 1 << 30,
) -> list[dict[str, Any]]:
    drawn = memory.draw("Logic", positive=positive, negative=negative, rng=random.Random(seed))
    return drawn.views(tokens, limit)


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """Draw facts in any order: programs return under other designs, windows close twice, in any state."""
    numbers, programs, states = st.integers(0, 12), st.integers(0, 2), st.sampled_from(STATES)
    told = st.sampled_from(("frontier", "mastered", *STATES))
    fact = st.one_of(
        st.builds(lambda n, p, d: [ready(n, program=p, degenerate=d)], numbers, programs, st.booleans()),
        st.builds(lambda n, p, s: [scored(n, program=p, state=s)], numbers, programs, states),
        st.builds(lambda n, p, s: [played(standing(n, s, program=p))], numbers, programs, states),
        st.builds(
            lambda n, p, s: [ready(n, program=p), scored(n, program=p, state=s)],
            st.integers(13, 99),
            st.integers(0, 1),
            told,
        ),
    )
    return [one for some in draw(st.lists(fact, max_size=40)) for one in some]


def test_positives_are_the_frontier_of_the_skill_with_their_programs() -> None:
    memory = Memory(50)
    remember(memory, 1)
    remember(memory, 2, state="mastered", win=0.97)
    remember(memory, 3, state="intractable", win=0.0)
    remember(memory, 4, skill="Maths")
    remember(memory, 5, state="fresh")
    views = examples(memory)
    assert titles(views, "positive") == ["Game 1"]
    assert views[0]["source"] == "class Game1Env: ..."
    assert views[0]["cut"] is False
    assert {view["title"]: view["state"] for view in views[1:]} == {
        "Game 2": "mastered",
        "Game 3": "intractable",
    }
    assert all(view["source"] == "" for view in views[1:])
    assert memory.states() == {"frontier": 2, "mastered": 1, "intractable": 1, "fresh": 1}


def test_positives_come_from_the_best_by_regret() -> None:
    memory = Memory(50)
    for number in range(30):
        remember(memory, number, regret=number / 30)
    drawn = {view["title"] for seed in range(200) for view in examples(memory, seed=seed, positive=2)}
    assert drawn == {f"Game {number}" for number in range(20, 30)}


@given(histories(), st.integers(0, 99))
@example(
    [ready(1, program=1), scored(1, program=1, state="mastered"), ready(2, program=1), scored(2, program=1)],
    0,
)
def test_no_sequence_of_facts_makes_a_mastered_environment_a_positive_example(
    facts: list[Message], seed: int
) -> None:
    memory, mastered = Memory(3, open_windows=4), set[str]()
    for fact in facts:
        tell(memory, fact)
        if isinstance(fact, EnvironmentScored) and fact.state in ("mastered", "degenerate"):
            mastered.add(fact.environment)
        shown = [view for view in examples(memory, seed=seed) if view["polarity"] == "positive"]
        assert not mastered & {view["environment"] for view in shown}
        assert {view["state"] for view in shown} <= {"frontier"}


@given(histories(), st.integers(0, 99))
def test_no_program_is_shown_to_follow_and_to_avoid(facts: list[Message], seed: int) -> None:
    """A program may be played in several windows at once: the one that it misses in counts."""
    memory = Memory(3, open_windows=4)
    for fact in facts:
        tell(memory, fact)
        now: dict[str, set[str]] = {}
        for record in (*memory.freeze().closed, *memory.freeze().open):
            now.setdefault(record.environment, set()).add(record.state)
        for view in examples(memory, seed=seed):
            if view["polarity"] == "positive":
                assert now[view["environment"]] <= {"frontier", "fresh"}


@given(histories(), st.integers(0, 60))
def test_a_memory_at_rest_and_the_facts_since_give_the_same_memory(facts: list[Message], cut: int) -> None:
    through, before, after = (Memory(3, open_windows=4) for _ in range(3))
    for fact in facts:
        tell(through, fact)
    for fact in facts[:cut]:
        tell(before, fact)
    data = msgspec.msgpack.encode(before.freeze())
    after.thaw(msgspec.msgpack.decode(data, type=MemoryState))
    assert after.freeze() == before.freeze()
    for fact in facts[cut:]:
        tell(after, fact)
    assert after.freeze() == through.freeze()
    assert examples(after, seed=cut) == examples(through, seed=cut)
    assert len(through) <= 3
    assert len(through.freeze().open) <= 4


def test_standings_correct_an_open_window_and_its_end_has_the_last_word() -> None:
    memory = Memory(5)
    memory.ready(ready(1))
    assert examples(memory) == []
    memory.played(played(standing(1, "intractable", win=0.0), standing(9, "frontier")))
    (view,) = examples(memory)
    assert (view["polarity"], view["win"]) == ("negative", 0.0)
    assert "of 4 plays" in view["why"]
    memory.played(played(standing(1, "frontier", regret=0.5)))
    (view,) = examples(memory)
    assert (view["polarity"], view["regret"], view["source"]) == ("positive", 0.5, "class Game1Env: ...")
    memory.scored(scored(1, state="mastered", win=0.9))
    (view,) = examples(memory)
    assert (view["polarity"], view["state"]) == ("negative", "mastered")
    assert memory.freeze().open == ()


@given(histories())
def test_a_window_that_is_closed_is_not_open(facts: list[Message]) -> None:
    """A record is of what was told last: the verdict of its window, or its newest standing."""
    memory, last = Memory(50), dict[str, str]()
    for fact in facts:
        tell(memory, fact)
        if isinstance(fact, EnvironmentScored):
            last[fact.environment] = fact.state
    frozen = memory.freeze()
    assert {record.environment: record.state for record in frozen.closed} == last
    assert all(record.closed for record in frozen.closed)
    assert not any(record.closed for record in frozen.open)
    scored_since = {fact.design for fact in facts[-1:] if isinstance(fact, EnvironmentScored)}
    assert not scored_since & {record.design for record in frozen.open}


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=12),
    st.integers(0, 3000),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 9),
)
def test_examples_stay_within_their_tokens(
    sizes: list[int], limit: int, positive: int, negative: int, seed: int
) -> None:
    memory = Memory(50)
    for number, size in enumerate(sizes):
        memory.ready(ready(number, source="x = 1\n" * size))
        memory.scored(scored(number, state="frontier" if number % 3 else "mastered"))
    views = examples(
        memory,
        seed=seed,
        positive=positive,
        negative=negative,
        tokens=lambda text: len(text) // 4,
        limit=limit,
    )
    spent = sum(
        len(view["source"] or f"{view['title']} {view['summary']} {view['why']}") // 4 for view in views
    )
    assert spent <= limit
    for view in views:
        whole = "x = 1\n" * sizes[int(view["title"].split()[1])]
        if view["polarity"] == "positive":
            assert whole.startswith(view["source"])
            assert view["cut"] == (view["source"] != whole)
            assert view["source"]


def test_programs_that_fit_come_before_the_beginning_of_one_that_does_not() -> None:
    memory = Memory(50)
    memory.ready(ready(1, source="long = 1\n" * 500))
    memory.scored(scored(1, regret=0.9))
    options: dict[str, Any] = {"positive": 1, "negative": 0, "tokens": len, "limit": 1000}
    (view,) = examples(memory, **options)
    assert view["cut"] is True
    assert view["source"].count("\n") == len(view["source"]) // 9
    memory.ready(ready(2, source="short = 1\n"))
    memory.scored(scored(2, regret=0.1))
    for seed in range(20):
        (view,) = examples(memory, seed=seed, **options)
        assert (view["title"], view["cut"]) == ("Game 2", False)
    assert examples(memory, **{**options, "limit": 20}) == []


@pytest.mark.parametrize(
    ("score", "made", "said"),
    [
        (
            {"state": "mastered", "win": 0.97, "win_low": 0.84, "plays": 32, "turns": 2.04, "hinted": 1.0},
            {"hint": "h"},
            "Too easy: .*97 % of 32 plays .*84-100 %.*2.0 turns.*A hint made no difference",
        ),
        (
            {"state": "intractable", "win": 0.0, "win_high": 0.11, "plays": 32, "hinted": 0.03},
            {"hint": "h"},
            "Too hard: .*0 % of 32 plays .*0-11 %.*A hint did not help",
        ),
        (
            {"state": "intractable", "win": 0.1, "win_high": 0.3, "hinted": 0.8},
            {"hint": "h"},
            "Too hard: .*With a hint they won 80 %",
        ),
        ({"state": "mastered", "win": 1.0}, {}, "Too easy: .*no hint"),
        (
            {"state": "degenerate", "win": 0.9},
            {"degenerate": True, "trivial_win_rate": 0.95},
            "without looking: blind play won 95 %",
        ),
        ({"state": "degenerate", "win": 0.0}, {}, "paid without being played, or broke"),
        ({"state": "degenerate", "leak": True, "hinted": 1.0}, {"hint": "it is 7"}, "gave the answer away"),
        (
            {"state": "degenerate"},
            {"flag": "off_ticket", "flag_reason": "a game of Logic"},
            "a game of Logic",
        ),
    ],
)
def test_a_negative_says_in_words_why_it_missed(
    score: dict[str, Any], made: dict[str, Any], said: str
) -> None:
    memory = Memory(5)
    memory.ready(ready(1, **made))
    memory.scored(scored(1, **score))
    (view,) = examples(memory)
    assert re.search(said, view["why"])


def test_a_design_that_is_told_of_again_makes_no_second_record() -> None:
    memory = Memory(10)
    memory.ready(ready(1))
    memory.ready(ready(1, program=2))
    assert [record.environment for record in memory.programs()] == ["e1"]
    memory.scored(scored(1))
    memory.ready(ready(1))
    assert (len(memory), memory.freeze().open) == (1, ())
    again = Memory(10)
    again.thaw(memory.freeze())
    again.ready(ready(1))
    assert again.freeze().open == ()


def test_a_hint_that_holds_the_answer_makes_no_best_example() -> None:
    memory = Memory(50)
    for number in range(12):
        memory.ready(ready(number))
        memory.scored(scored(number, regret=0.1 + number / 100, leak=number == 11, noise_floor=0.2))
    drawn = [view for seed in range(40) for view in examples(memory, seed=seed, positive=3)]
    assert {view["environment"] for view in drawn} == {f"e{number}" for number in range(1, 11)}


def test_what_was_flagged_is_no_example_to_follow() -> None:
    memory = Memory(10)
    for number, flag in ((1, ""), (2, "off_ticket"), (3, "incoherent")):
        memory.ready(ready(number, flag=flag))
        memory.scored(scored(number))
    assert [view["environment"] for view in examples(memory)] == ["e1"]
