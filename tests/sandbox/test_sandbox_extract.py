from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import extract

PROGRAM = "class Env:\n    pass"


@pytest.mark.parametrize(
    "text",
    [
        PROGRAM,
        f"\n{PROGRAM}\n",
        f"Here:\n```python\n{PROGRAM}\n```\nDone.",
        f"```py\n{PROGRAM}\n```\n```python\nother\n```",
        f"```\n{PROGRAM}\n```",
        f"```text\nidea\n```\n```Python\n{PROGRAM}\n```",
        f"```\nidea\n```\n```python\n{PROGRAM}\n```",
        f"<think>\n```python\nwrong\n```\n</think>\n```python\n{PROGRAM}\n```",
        f"<think>a</think>b</think>{PROGRAM}",
        f"  ```python title=x\n{PROGRAM}\n  ```",
        f"Here:\n```python\n{PROGRAM}\n```\nDone.\n".replace("\n", "\r\n"),
        PROGRAM.replace("\n", "\r\n"),
    ],
)
def test_program_is_found(text: str) -> None:
    assert extract(text) == PROGRAM


def test_first_complete_block_wins() -> None:
    assert extract(f"```python\n{PROGRAM}\n```\n```python\nsecond\n```\n```python\nopen") == PROGRAM


def test_open_block_is_the_whole_text() -> None:
    assert extract(f"```python\n{PROGRAM}") == f"```python\n{PROGRAM}"


def test_empty() -> None:
    assert extract("<think>nothing</think>  \n") == ""


def test_a_thought_without_an_end_is_no_answer() -> None:
    assert extract(f"\n<think>\nperhaps\n```python\n{PROGRAM}\n```\nor") == ""
    assert extract(f"<think>a</think>\n<think>\n```python\n{PROGRAM}\n```") == ""
    assert "<think>" in extract(f"```python\n{PROGRAM}  # <think>\n```")


@given(st.text(alphabet="`py\n ab", max_size=60))
def test_never_longer_than_the_text(text: str) -> None:
    assert len(extract(text)) <= len(text)


@given(st.text(alphabet="xy =1\n", min_size=1, max_size=60).filter(str.strip))
def test_fenced_text_comes_out_as_it_went_in(body: str) -> None:
    assert extract(f"words\n```python\n{body}\n```\nwords") == body.strip("\n")


# What a fence is, said another way; too slow for long texts, because it looks for an end from every opening.
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+.-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def plainly(text: str) -> str:
    blocks = [(match[1].lower(), match[2]) for match in _FENCE.finditer(text)]
    named = [body for language, body in blocks if language in ("python", "py", "python3")]
    bare = [body for language, body in blocks if not language]
    return (named or bare)[0].strip("\n") if named or bare else text.strip()


@given(
    st.lists(
        st.sampled_from(("```", "```py", "``` python x", " ```\t", "a", "", "\n", "````", "```\r")),
        max_size=12,
    )
)
def test_fences_are_what_they_were(lines: list[str]) -> None:
    text = "\n".join(lines)
    assert extract(text) == plainly(text.replace("\r\n", "\n"))


@pytest.mark.parametrize("line", ["```python\n", "```python x\n", "```\n", "``` ```\n", " \t```", "```"])
def test_a_model_that_repeats_itself_costs_nothing(line: str) -> None:
    began = time.thread_time()
    extract(line * 20_000)
    assert time.thread_time() - began < 1.0
