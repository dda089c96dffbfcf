from __future__ import annotations

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


@given(st.text(alphabet="`py\n ab", max_size=60))
def test_never_longer_than_the_text(text: str) -> None:
    assert len(extract(text)) <= len(text)


@given(st.text(alphabet="xy =1\n", min_size=1, max_size=60).filter(str.strip))
def test_fenced_text_comes_out_as_it_went_in(body: str) -> None:
    assert extract(f"words\n```python\n{body}\n```\nwords") == body.strip("\n")
