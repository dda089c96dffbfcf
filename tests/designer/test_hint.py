"""Hints."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes.judged_programs import judged

from bus.messages import WaysToWin
from engine.nano import seeds
from roles.designer.hint import LONGEST_HINT, adds_nothing, clean_hint, gives_away
from roles.designer.review import ways_to_win
from roles.text_normalise import plain


@pytest.mark.parametrize(
    ("text", "finish", "hint"),
    [
        ("lever 4 to 5", "stop", "lever 4 to 5"),
        ("  two\n lines ", "stop", "two lines"),
        ("<think>the answer is 5</think> Try small numbers.", "stop", "Try small numbers."),
        ("Hint: look left", "stop", "look left"),
        ("HINT: HINT", "stop", "HINT"),
        ("", "stop", None),
        ("  \n", "stop", None),
        ("hint:", "stop", None),
        ("<think>endless", "length", None),
        ("<think>then it stopped", "stop", None),
        ("```python\nclass AEnv: ...\n```", "stop", None),
        ("look \0 left", "stop", None),
        ("look \x1b[2J left", "stop", None),
        ("\u201eq\u201c caf\u00e9 \u6c34 \u2600", "stop", "\u201eq\u201c caf\u00e9 \u6c34 \u2600"),
        ("cut in the middle", "length", None),
        ("play \\boxed{5}", "stop", None),
        ("<think>\\boxed{5}</think>play low", "stop", "play low"),
        ("x" * LONGEST_HINT, "stop", "x" * LONGEST_HINT),
        ("x" * (LONGEST_HINT + 1), "stop", None),
    ],
)
def test_examples(text: str, finish: str, hint: str | None) -> None:
    assert clean_hint(text, finish) == hint


@given(st.text(max_size=2000))
def test_what_is_accepted_is_one_bounded_line_without_an_action(text: str) -> None:
    hint = clean_hint(text, "stop")
    if hint is not None:
        assert hint
        assert len(hint) <= LONGEST_HINT
        assert len(hint.splitlines()) == 1
        assert "\\boxed" not in hint


NUMBERS = WaysToWin(alone=("17", "42", "42", "63"), actions=tuple(map(str, range(100))))
DOORS = WaysToWin(alone=("red", "red", "blue"), actions=("red", "blue", "green", "open"))
WAY = WaysToWin(plans=(("left", "left", "up"), ("up", "right")), actions=("left", "up", "right", "down"))
ALWAYS = WaysToWin(alone=("swordfish",) * 3, actions=("swordfish", "banana"), instances=3)
SEVEN = WaysToWin(alone=("7",) * 5, actions=("7", "8"), instances=5)
LETTERS = WaysToWin(alone=("A", "D", "D"), actions=tuple("ABCD"), instances=5)
OFTEN = WaysToWin(alone=("4",) * 5, actions=("4", "5"), instances=12)
ROOMS = WaysToWin(plans=(("go to kitchen", "take key", "go to hall"),), actions=("take key",))
CELLS = ("A1", "B4", "B5")
GRID = WaysToWin(alone=("B4", "B4"), actions=CELLS, instances=2)
PAIRS = WaysToWin(alone=("2,3",) * 4, actions=("2", "3", "1,1", "2,3"), instances=4)
DECIMALS = WaysToWin(alone=("3.5",) * 2, actions=("3.5", "4.0"), instances=6)
OPEN = WaysToWin(alone=("open door",) * 3, actions=("open", "open door", "look"), instances=3)
LONG = WaysToWin(alone=("pull the rusty chain",), actions=("wait",), instances=6)


@pytest.mark.parametrize(
    ("hint", "wins", "gives"),
    [
        ("The answer is 42.", NUMBERS, True),
        ("the secret number: 17", NUMBERS, True),
        ("Try 42 at once.", NUMBERS, True),
        ("It lies in 40..44.", NUMBERS, False),
        ("It is one of 17, 42 and 63.", NUMBERS, False),
        ("Add 3 each time.", NUMBERS, False),
        ("Halve what is left.", NUMBERS, False),
        ("Open red.", DOORS, False),
        ("Always the red one.", DOORS, True),
        ("The key is blue", DOORS, True),
        ("The redder the better.", DOORS, False),
        ("Go left, left, then up.", WAY, True),
        ("First up, and then right!", WAY, True),
        ("Left is never the right way up.", WAY, False),
        ("Walls are left of doors.", WAY, False),
        ("Say swordfish.", ALWAYS, True),
        ("Think of a fish.", ALWAYS, False),
        ("Say it loud: swordfish, or banana.", ALWAYS, True),
        ("4..6", OFTEN, False),
        ("Go to kitchen, take key, go to hall.", ROOMS, True),
        ("go to kitchen, then take key and finally go to hall", ROOMS, True),
        ("Take key before you go to hall.", ROOMS, False),
        ("Shoot at B4.", GRID, True),
        ("b4", GRID, True),
        ("The answer is: B4", GRID, True),
        ("Shoot at B4 or at B5.", GRID, False),
        ("Look for a ship of 4.", GRID, False),
        ("Shoot at B4.", WaysToWin(alone=("B4",), actions=CELLS, instances=6), False),
        ("Dig at 2,3", PAIRS, True),
        ("Dig at (2, 3).", PAIRS, True),
        ("Go 2 steps.", PAIRS, False),
        ("Set 3.5 at last", DECIMALS, True),
        ("Set 3 or so", DECIMALS, False),
        ("You open the door? No: open door!", OPEN, True),
        ("Keys open doors.", OPEN, False),
        ("Pull the rusty chain.", LONG, True),
        ("Pull the chain.", LONG, False),
        ("Halve the range, starting at 50.", WaysToWin(alone=("50",), instances=6), False),
        ("Halve the range, starting at 50.", WaysToWin(alone=("50", "50", "7"), instances=6), True),
        ("Say seven.", SEVEN, True),
        ("the answer is SEVEN", SEVEN, True),
        ("\uff17 it is", SEVEN, True),
        ("07", SEVEN, True),
        ("Say s-e-v-e-n.", SEVEN, True),
        ("7\u200b", SEVEN, True),
        ("Say seventy.", SEVEN, False),
        ("seventy-seven", SEVEN, False),
        ("Say 7", WaysToWin(alone=("seven",) * 3, instances=3), True),
        ("Say s w o r d f i s h", ALWAYS, True),
        ("sword\u00adfish", ALWAYS, True),
        ("OPENDOOR!", OPEN, True),
        ("Try 42 at once, in two steps.", NUMBERS, True),
        ("I am a b or c", DOORS, False),
        ("It is A, B, C or D.", LETTERS, False),
        ("It is D.", LETTERS, True),
        ("", WaysToWin(), False),
        ("Say 5", WaysToWin(), False),
    ],
)
def test_a_hint_may_not_name_the_winning_action(hint: str, wins: WaysToWin, gives: bool) -> None:
    assert bool(gives_away(hint, wins)) is gives


@given(st.integers(0, 99))
def test_numbers_in_words_are_read(number: int) -> None:
    """All but *one*, which is seldom a number."""
    units = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    small = [*units.split(), "sixteen", "seventeen", "eighteen", "nineteen"]
    tens = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    tail = f"-{small[number % 10]}" if number % 10 else ""
    said = small[number] if number < 20 else tens[number // 10] + tail
    assert plain(f"Say {said}.") == f"Say {'one' if number == 1 else number}."


@given(st.text(max_size=80), st.text(alphabet="0123456789", min_size=1, max_size=4))
def test_saying_that_something_is_the_answer_is_always_seen(before: str, action: str) -> None:
    assert gives_away(f"{before} the answer is {action}.", WaysToWin(alone=(action, "other")))


@pytest.mark.parametrize(
    ("hint", "firsts", "nothing"),
    [
        ("The kites hide in 0..9", ["The kites hide in 0..9, 3 tries"], True),
        ("kites hide", ["The kites hide in 0..9, 3 tries"], True),
        ("0..9", ["The kites hide in 0..9, 3 tries"], True),
        ("0..3", ["The kites hide in 0..9, 3 tries"], False),
        ("4..6", ["The kites hide in 0..9, 3 tries"], False),
        ("add 3", ["The kites go 7?, 3 tries"], False),
        ("red tan blue", ["run tan blue ?", "run red tan blue ?"], False),
        ("red tan blue", ["run red tan blue ?", "run red tan blue red ?"], True),
        ("You can try to play it.", ["anything"], True),
        ("Reach the exit by the doors.", ["Reach the exit. There are doors: red, blue."], True),
        ("Take blue before red.", ["The doors are red, blue."], False),
        ("Halve the range each time.", ["A number from 1 to 9."], False),
        ("anything", [], False),
    ],
)
def test_a_hint_holds_what_the_observation_does_not(hint: str, firsts: list[str], nothing: bool) -> None:
    assert adds_nothing(hint, firsts) is nothing


@pytest.mark.parametrize("family", seeds.families(), ids=lambda family: family.name)
def test_the_hints_of_seed_programs_are_hints(family: seeds.Family) -> None:
    rng = Random(7)
    for level in family.seed_levels * 3:
        parameters = family.draw(level, rng, withheld=False)
        source = family.program(parameters, rng.choice(seeds.NOUNS))
        verdict = judged(source, turns=family.max_turns)
        hint = family.hint(parameters)
        assert gives_away(hint, ways_to_win(verdict)) == "", source
        # where all of a cycle or of a short range is shown, its hint is no news: the writer is asked again
        if level > {"cycle": 6, "levers": 2}.get(family.name, 1):
            assert not adds_nothing(hint, verdict.first_observations), source
