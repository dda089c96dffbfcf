"""The designer's memory."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages import EnvironmentReady, EnvironmentScored
from roles.designer.memory import Memory


def ready(number: int, *, skill: str = "Logic", source: str | None = None) -> EnvironmentReady:
    return EnvironmentReady(
        design=f"d{number}",
        cohort=0,
        slot=number,
        attempt=0,
        skill=skill,
        environment=f"e{number}",
        source=source if source is not None else f"class Game{number}Env: ...",
        hint=None,
        document=f"doc{number}",
        title=f"Game {number}",
        trivial_win_rate=0.0,
        degenerate=False,
    )


def scored(
    number: int,
    *,
    skill: str = "Logic",
    state: Any = "frontier",
    regret: float | None = 0.2,
    win: float = 0.5,
):
    return EnvironmentScored(
        design=f"d{number}",
        cohort=0,
        environment=f"e{number}",
        skill=skill,
        document=f"doc{number}",
        round=4,
        plays=8,
        hinted_plays=8,
        win=win,
        win_low=0.0,
        win_high=1.0,
        hinted=None,
        regret=regret,
        regret_low=None,
        regret_high=None,
        plateau=1.0,
        reward=0.5,
        advantage=0.0,
        state=state,
    )


def remember(memory: Memory, number: int, **fields: Any) -> None:
    memory.ready(ready(number, skill=fields.get("skill", "Logic")))
    memory.scored(scored(number, **fields))


def test_positives_are_the_frontier_of_the_skill_with_their_programs() -> None:
    memory = Memory(50)
    remember(memory, 1)
    remember(memory, 2, state="mastered", win=0.97)
    remember(memory, 3, state="intractable", win=0.0)
    remember(memory, 4, skill="Maths")
    remember(memory, 5, state="fresh")
    views = memory.examples("Logic", positive=5, negative=5, rng=random.Random(0))
    assert [(view["polarity"], view["title"]) for view in views[:1]] == [("positive", "Game 1")]
    assert views[0]["source"] == "class Game1Env: ..."
    assert views[0]["cut"] is False
    assert {view["title"]: view["state"] for view in views[1:]} == {
        "Game 2": "mastered",
        "Game 3": "intractable",
    }
    assert all(view["source"] == "" for view in views[1:])


def test_positives_come_from_the_best_by_regret() -> None:
    memory = Memory(50)
    for number in range(30):
        remember(memory, number, regret=number / 30)
    drawn = {
        view["title"]
        for seed in range(200)
        for view in memory.examples("Logic", positive=2, negative=0, rng=random.Random(seed))
    }
    assert drawn == {f"Game {number}" for number in range(20, 30)}


def test_a_scored_design_without_its_program_is_no_positive() -> None:
    memory = Memory(50)
    memory.scored(scored(1))
    memory.scored(scored(2, state="mastered"))
    views = memory.examples("Logic", positive=1, negative=1, rng=random.Random(0))
    assert [view["polarity"] for view in views] == ["negative"]


def test_the_same_program_again_replaces_its_record() -> None:
    memory = Memory(5)
    remember(memory, 1, state="frontier")
    remember(memory, 1, state="mastered")
    assert len(memory) == 1
    (view,) = memory.examples("Logic", positive=1, negative=1, rng=random.Random(0))
    assert view["state"] == "mastered"


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 40), st.sampled_from(["frontier", "mastered"])), max_size=120
    ),
    st.integers(0, 2**32),
)
def test_it_is_bounded_and_replay_gives_the_same_examples(
    facts: list[tuple[bool, int, str]], seed: int
) -> None:
    lives = [Memory(7, open_windows=9) for _ in range(2)]
    for memory in lives:
        for is_ready, number, state in facts:
            if is_ready:
                memory.ready(ready(number))
            else:
                memory.scored(scored(number, state=state))
    assert len(lives[0]) <= 7
    assert lives[0].waiting <= 9
    first, second = (
        memory.examples("Logic", positive=2, negative=1, rng=random.Random(seed)) for memory in lives
    )
    assert first == second
    assert sum(view["polarity"] == "positive" for view in first) <= 2
    assert len({view["title"] for view in first}) == len(first)


@pytest.mark.parametrize("skill", ["Logic", "Nothing"])
def test_an_empty_memory_has_no_examples(skill: str) -> None:
    assert Memory(3).examples(skill, positive=2, negative=1, rng=random.Random(0)) == []
