"""The contamination guard."""

from __future__ import annotations

from engine.evals.contamination import WORDS, Guard

QUESTION = (
    "Find the number of ways to colour the six faces of a cube with at most three colours up to rotation."
)


def test_a_copied_question_is_found_in_a_corpus() -> None:
    guard = Guard(
        {"aime": {"0": QUESTION, "1": "What is the sum of all primes below one hundred and seven?"}}
    )
    document = f"Lecture 3.\n  {QUESTION.upper().replace(' ', chr(10))} The answer follows from Burnside."
    assert guard.found(document) == {("aime", "0")}
    assert guard.count({"corpus": [document, document], "designs": ["something else entirely"]}) == {
        "aime": {"corpus": 1}
    }


def test_fewer_common_words_are_no_copy() -> None:
    words = QUESTION.split()
    guard = Guard({"aime": {"0": QUESTION}})
    assert guard.found(" ".join(words[: WORDS - 1])) == set()
    assert guard.found(" ".join(words[2 : WORDS + 2]))


def test_the_form_of_all_questions_is_no_copy() -> None:
    form = "Answer the question below with one whole number and put it into a box: how many {} are there?"
    guard = Guard({"s": {kind: form.format(kind) for kind in ("stars", "rocks", "birds", "trees")}})
    assert guard.found(form.format("dogs")) == set()
    assert guard.found(f"So: {form.format('birds')}") == {("s", "birds")}


def test_a_text_of_a_few_words_says_nothing() -> None:
    guard = Guard(
        {"s": {"short": "What is 2 + 2?", "middle": "Which of these planets has the largest known moon?"}}
    )
    assert guard.found("What is 2 + 2? I wonder.") == set()
    assert guard.found("quiz: which of these planets has the largest known moon") == {("s", "middle")}
