"""The documentation shows the files of its example whole, and the picture that its script draws."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize(("language", "file"), [("python", "counter.py"), ("toml", "pyproject.toml")])
def test_the_page_of_roles_shows_its_example(language: str, file: str) -> None:
    (shown,) = re.findall(rf"```{language}\n(.*?)```", (DOCS / "roles.md").read_text(), re.DOTALL)
    assert shown == (DOCS / "examples" / "counter" / file).read_text()


@pytest.mark.parametrize(("language", "file"), [("python", "sums.py"), ("toml", "pyproject.toml")])
def test_the_page_of_suites_shows_its_example(language: str, file: str) -> None:
    (shown,) = re.findall(rf"```{language}\n(.*?)```", (DOCS / "suites.md").read_text(), re.DOTALL)
    assert shown == (DOCS / "examples" / "sums" / file).read_text()


def test_the_picture_is_up_to_date() -> None:
    script = runpy.run_path(str(DOCS / "draw_architecture.py"))
    assert (DOCS / "architecture.svg").read_text() == script["draw"](), "run python docs/draw_architecture.py"
