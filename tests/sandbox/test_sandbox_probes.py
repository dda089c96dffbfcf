"""The pure parts of the validator."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.actions import formats, literals, plausible, tool_actions
from sandbox.answer_leak import copied, places, said
from sandbox.frames import StepResult
from sandbox.probes import Transcript, inner, solution_actions
from sandbox.seed_variation import differ
from sandbox.trivial_policies import coin, interval, spread


@pytest.mark.parametrize(
    ("observation", "first"),
    [
        ("kites peak in 0..8, 2 tries", "0 1 2 3 4 5 6 7 8"),
        ("say \\boxed{RGB} or 'two words' of 0..3", "RGB 0 1 2 3"),
        ("between 1 and 1000", "500 250 750 1 1000"),
        ("between 17 and 19", "17 18 19"),
        ("between -3 and -1", "-3 -2 -1"),
        ("a number from 0 to 1000000000", "500000000"),
        ("red blue red ?", "red blue"),
    ],
)
def test_plausible_actions(observation: str, first: str) -> None:
    assert " ".join(plausible(observation)).startswith(first)


def test_plausible_actions_are_few_and_different() -> None:
    assert "two words" in plausible("say 'two words'")
    assert "it" not in plausible("don't say 'it")[:1]
    assert len(plausible("0..40 50-90 " + " ".join(map(chr, range(97, 123))))) <= 64
    assert len(set(plausible("5 5 5"))) == len(plausible("5 5 5"))
    assert not any(len(action) > 20 for action in plausible("from 1 to " + "9" * 30))
    assert plausible("")


def test_solution_actions() -> None:
    assert solution_actions("\\boxed{1} then \\boxed{2}") == ["1", "2"]
    assert solution_actions([1, "\\boxed{b}"]) == ["1", "b"]
    assert solution_actions(" up ") == ["up"]
    assert solution_actions([""]) == [""]  # of a list, an empty answer is one


@pytest.mark.parametrize(
    ("observation", "action", "leaks"),
    [
        (" 5 ", "5", True),
        ("The answer is: 5.", "5", True),
        ("Secret=red", "red", True),
        ("Answer: yes or no", "yes", False),
        ("answer 'Yes' or 'No'", "Yes", False),
        ("key: a/b/c", "a", False),
        ("Choose 5 or 6; the answer matters", "5", False),
        ("the key is 55", "5", False),
        ("anything", "", False),
    ],
)
def test_leaks(observation: str, action: str, leaks: bool) -> None:
    assert said(observation, action) is leaks


def played(*pairs: tuple[str, str], first: str = "go") -> Transcript:
    steps = tuple(StepResult(observation, 0.0, False, False) for _, observation in pairs)
    return Transcript(first, tuple(action for action, _ in pairs), steps)


def test_transcripts_differ_only_for_the_same_actions() -> None:
    assert not differ([played(("1", "a"), ("2", "b")), played(("1", "a"), ("2", "b"))])
    assert not differ([played(("1", "a"), ("2", "b")), played(("1", "a"), ("3", "c"))])
    assert not differ([played(("1", "a")), played(("1", "a"), ("3", "c"))])
    assert differ([played(("1", "a"), ("2", "b")), played(("1", "a"), ("2", "c"))])
    assert differ([played(), played(), played(first="other")])


def test_calls_that_schemas_suggest() -> None:
    tools = [
        {
            "function": {
                "name": "set",
                "parameters": {
                    "properties": {
                        "mode": {"enum": ["on", "off"]},
                        "level": {"type": "integer", "minimum": 3, "maximum": 5},
                        "names": {"type": "array", "items": {"type": "string"}},
                        "more": {"anyOf": [{"type": "null"}, {"type": "object"}, {"type": "number"}]},
                        "sure": {"type": "boolean"},
                        "any": {},
                    }
                },
            }
        }
    ]
    actions = tool_actions(tools, "Set it to 4 or 17")
    calls = [json.loads(action) for action in actions]
    made = [call["arguments"] for call in calls if call.get("name") == "set"]
    assert {call["mode"] for call in made} == {"on", "off"}
    assert all(3 <= call["level"] <= 5 for call in made)
    assert any(call == {"answer": "4"} for call in calls)
    assert len(set(actions)) == len(actions) <= 64


def test_places_of_a_word() -> None:
    assert places(["code 7 now", "code 9 now", "code 4 now"]) == [("code",)]
    assert places(["code 7", "code 7", "code 7"]) == []
    assert places(["code 7", "code 9", "from 4 on"]) == []
    assert copied("3 of 12: code 88", ("#", "code")) is None
    assert copied("of 12 code 88", ("#", "code")) == "88"


def test_intervals() -> None:
    assert interval(0, 0) == (0.0, 1.0)
    low, high = interval(8, 16)
    assert low == pytest.approx(0.28, abs=0.001)
    assert high == pytest.approx(0.72, abs=0.001)
    assert interval(0, 5)[0] == 0.0
    assert interval(64, 64)[1] == 1.0


@given(st.integers(1, 200), st.data())
def test_intervals_hold_the_rate(played: int, data: st.DataObject) -> None:
    won = data.draw(st.integers(0, played))
    low, high = interval(won, played)
    assert 0 <= low <= won / played <= high <= 1


def outcomes(rates: list[float], seeds: int, *, exclusive: bool, seed: int) -> dict[str, list[float]]:
    """Outcomes of constant actions: of one hidden choice that excludes the others, or of a coin each."""
    rng = random.Random(seed)
    won: dict[str, list[float]] = {str(i): [] for i in range(len(rates))}
    for _ in range(seeds):
        at = rng.random()
        for i, rate in enumerate(rates):
            at -= rate if exclusive else 0
            won[str(i)].append(-rate <= at < 0 if exclusive else rng.random() < rate)
    return won


def at(turn: int, paid: Sequence[float]) -> list[tuple[float, int]]:
    return [(won, turn) for won in paid]


def flagged(rates: list[float], *, exclusive: bool, plays: int = 200) -> float:
    """How often such a game would be called a coin at one of the looks."""
    hits = 0
    for seed in range(plays):
        won = outcomes(rates, 64, exclusive=exclusive, seed=seed)
        looks = ({action: at(1, results[:n]) for action, results in won.items()} for n in (16, 32, 64))
        hits += any(coin(look, 0.25) for look in looks)
    return hits / plays


def test_coins_are_flagged_and_honest_guesses_are_not() -> None:
    assert flagged([0.5, 0.5, 0.5, 0.5], exclusive=False) > 0.95
    assert flagged([0.5, 0.5], exclusive=True) > 0.9
    for choices in (3, 4, 5, 8):
        assert flagged([1 / choices] * min(4, choices), exclusive=True) == 0, choices
    # two actions that mean two of five, as where everything unknown counts as one of them
    assert flagged([0.2, 0.2], exclusive=True) < 0.01
    assert flagged([0.5, 0.5, 0.0, 0.0], exclusive=True) == 0


def test_one_coin_for_all_actions_is_found_though_it_rarely_falls() -> None:
    toss = [number % 5 == 0 for number in range(16)]

    def judged(one: Sequence[float], other: Sequence[float]) -> str:
        return coin({"a": at(1, one), "b": at(2, other)}, 0.25)

    assert "same outcome in all 16 instances, and won 4" in judged(toss, toss)
    assert judged(toss, [False, *toss[1:]]) == ""
    assert judged([False] * 16, [False] * 16) == ""
    assert judged(toss[:9], toss[:9]) == ""
    assert judged([0.1] * 64, [0.1] * 64) == ""
    assert "won 28.8" in judged([0.45] * 64, [0.45] * 64)


def test_several_tries_are_no_coin() -> None:
    """Of three that come in turn each is right at one of two tries in two of three instances."""
    won = {
        action: [
            (1.0, 1) if n % 3 == k else (1.0, 2) if n % 3 == (k + 1) % 3 else (0.0, 2) for n in range(64)
        ]
        for k, action in enumerate("abc")
    }
    assert coin(won, 0.25) == ""
    assert "won 42" in coin(
        {action: at(1, [paid for paid, _ in results]) for action, results in won.items()}, 0.25
    )


@pytest.mark.parametrize(
    "observation",
    [
        "9" * 65_536,
        "1 to " + "9" * 5_000,
        "9" * 5_000 + "..9",
        "1" + " " * 65_000,
        "1 " * 32_000,
        "1-40 " * 13_000,
        "9-" * 32_000,
        "\\boxed{" * 9_000,
        "\\boxed{" + "x" * 65_000,
        "'" * 65_000,
        "say a " * 10_000,
        "say" + " the" * 16_000 + "!",
        "<" * 65_000,
        "\u0661" * 60_000,
    ],
    ids=lambda text: f"{text[:8]}... {len(text)}",
)
def test_no_observation_holds_the_engine_up(observation: str) -> None:
    began = time.thread_time()
    actions = plausible(observation)
    assert len(formats(observation)) <= 4
    assert time.thread_time() - began < 0.5
    assert 0 < len(actions) <= 64
    assert inner(observation) is not None


@pytest.mark.parametrize(
    ("observation", "found"),
    [
        ("What is 3*4? Answer SUM: n", ("SUM: 1",)),
        ("Fire at the fleet 7; give row,column.", ("1,2",)),
        ("Cells are free. Use 'move X Y' or 'fire X Y'.", ("move 1 2", "fire 1 2")),
        ('Order with {"item": ..., "count": ...}.', ('{"1": 2, "3": 4}',)),
        ("Reply as <name> is <number>.", ("1 is 2",)),
        ("Guess my number.", ()),
        ("Say left or right.", ()),
    ],
)
def test_formats_that_a_text_quotes_are_filled_in(observation: str, found: tuple[str, ...]) -> None:
    assert set(found) <= set(formats(observation)) or not found
    assert found or not formats(observation)


@pytest.mark.parametrize(
    "source",
    [
        "x ==" + " " * 120_000 + "'a'",
        "x in" + "\n" * 60_000 + "(" + " " * 60_000,
        "== " * 40_000,
        "'\\" * 60_000,
        "'a\n" * 40_000,
        "9" * 120_000,
    ],
    ids=lambda text: f"{text[:6]!r}... {len(text)}",
)
def test_no_source_holds_the_engine_up(source: str) -> None:
    began = time.thread_time()
    assert len(literals(source)) <= 32
    assert time.thread_time() - began < 0.5


def test_spread_leaves_nothing_out() -> None:
    for size in range(1, 40):
        assert sorted(spread(list(map(str, range(size))))) == sorted(map(str, range(size)))
    assert list(spread(list("abcdefgh")))[:4] == ["a", "e", "c", "g"]
