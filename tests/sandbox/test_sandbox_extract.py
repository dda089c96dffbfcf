"""The program in a reply (fences by CommonMark, the block that is a game), and its syntax tree."""

from __future__ import annotations

import ast
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import extract, source

PROGRAM = "class Env:\n    pass"
FENCED = 'class AEnv:\n    """Shows\n\n    ```\n    the board\n    ```\n    """'
RULES = 'RULES = """\n```\nx.o\n```\n"""\nclass BEnv:\n    pass'
LIST = "1. The program:\n\n   ```python\n   class Env:\n       pass\n   ```\n"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (PROGRAM, PROGRAM),
        (f"\n{PROGRAM}\n", PROGRAM),
        (f"Here:\n```python\n{PROGRAM}\n```\nDone.", PROGRAM),
        (f"```py\n{PROGRAM}\n```\n```python\nother\n```", PROGRAM),
        (f"```\n{PROGRAM}\n```", PROGRAM),
        (f"```text\nidea\n```\n```Python\n{PROGRAM}\n```", PROGRAM),
        (f"```\nidea\n```\n```python\n{PROGRAM}\n```", PROGRAM),
        (f"<think>\n```python\nwrong\n```\n</think>\n```python\n{PROGRAM}\n```", PROGRAM),
        (f"<think>a</think>b</think>{PROGRAM}", PROGRAM),
        (f"  ```python title=x\n  {PROGRAM}\n  ```".replace("\n    p", "\n      p"), PROGRAM),
        (f"Here:\n```python\n{PROGRAM}\n```\nDone.\n".replace("\n", "\r\n"), PROGRAM),
        (PROGRAM.replace("\n", "\r\n"), PROGRAM),
        # fences that CommonMark allows
        (f"```python\n{FENCED}\n```", FENCED),
        (f"````python\n{FENCED}\n````", FENCED),
        (f"~~~python\n{FENCED}\n~~~", FENCED),
        (f"```python3.11\n{PROGRAM}\n```", PROGRAM),
        (f"```{{python}}\n{PROGRAM}\n```", PROGRAM),
        ("```pycon\n>>> class Env:\n...     pass\n```", PROGRAM),
        (f"\ufeff```python\n{PROGRAM}\n```", PROGRAM),
        (LIST, PROGRAM),
        (f"> ```python\n> {PROGRAM}\n> ```".replace("\n    p", "\n>     p"), PROGRAM),
        # fences that it does not
        (f"```python\n{RULES}\n```\nPlay it.", RULES),
        (f"```python\n{PROGRAM}\n``` done", PROGRAM),
        # the block that is the game
        (f"```python\nenv = AEnv()\nenv.reset(1)\n```\n```python\n{PROGRAM}\n```", PROGRAM),
        (f"```python\nimport random\n```\nThen:\n```python\n{PROGRAM}\n```\n```python\nEnv()\n```", PROGRAM),
        (f"```python\nclass Env:\n  def broken(\n```\nAgain:\n```python\n{PROGRAM}\n```", PROGRAM),
        (f"```\nclass Env: x\n ...\n```\n```\n{PROGRAM}\n```", PROGRAM),
        (f"```python\n{PROGRAM}\n```\n```python\nsecond\n```\n```python\nopen", PROGRAM),
        # an open block is the whole text, a thought without an end is no answer
        (f"```python\n{PROGRAM}", f"```python\n{PROGRAM}"),
        ("<think>nothing</think>  \n", ""),
        (f"\n<think>\nperhaps\n```python\n{PROGRAM}\n```\nor", ""),
        (f"<think>a</think>\n<think>\n```python\n{PROGRAM}\n```", ""),
        (f"```python\n{PROGRAM}  # <think>\n```", f"{PROGRAM}  # <think>"),
    ],
)
def test_program_is_found(text: str, program: str) -> None:
    assert extract(text) == program


@given(st.text(alphabet="`py\n ab", max_size=60))
def test_never_longer_than_the_text(text: str) -> None:
    assert len(extract(text)) <= len(text)


@given(st.text(alphabet="xy =1\n", min_size=1, max_size=60).filter(str.strip))
def test_fenced_text_comes_out_as_it_went_in(body: str) -> None:
    assert extract(f"words\n```python\n{body}\n```\nwords") == body.strip("\n")


@pytest.mark.parametrize(
    "line",
    [
        "```python\n",
        "```python x\n",
        "```\n",
        "``` ```\n",
        " \t```",
        "```",
        "- ```python\n",
        "> > > a\n",
        "1. ",
    ],
)
def test_a_model_that_repeats_itself_costs_nothing(line: str) -> None:
    began = time.thread_time()
    extract(line * 20_000 + "```")
    assert time.thread_time() - began < 1.5


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    true, together = ast.parse, threading.Barrier(2)
    met: list[int] = []

    def slow(text: str) -> ast.Module:
        try:
            met.append(together.wait(timeout=0.05))
        except threading.BrokenBarrierError:
            together.reset()
        return true(text)

    monkeypatch.setattr(source.ast, "parse", slow)
    with ThreadPoolExecutor(2) as threads:
        trees = list(threads.map(source.parse, ["x = 1"] * 4))
    assert all(isinstance(tree, ast.Module) for tree in trees)
    assert met == [], "two were in the parser at once"


@pytest.mark.parametrize("text", ["class", "x = '\0'", "(" * 500])
def test_what_cannot_be_read_is_none(text: str) -> None:
    assert source.parse(text) is None


def test_odd_escapes_are_no_warning_and_filters_stay() -> None:
    before = list(warnings.filters)
    assert source.parse("x = '\\d'") is not None
    assert warnings.filters == before
