"""Programs are read one at a time: CPython 3.11 counts the depth of trees for all threads together."""

from __future__ import annotations

import ast
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandbox import source


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
