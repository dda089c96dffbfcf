"""The role of ``docs/roles.md``: the page shows the files of its example, whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize(("language", "file"), [("python", "counter.py"), ("toml", "pyproject.toml")])
def test_the_page_shows_the_example(language: str, file: str) -> None:
    (shown,) = re.findall(rf"```{language}\n(.*?)```", (DOCS / "roles.md").read_text(), re.DOTALL)
    assert shown == (DOCS / "examples" / "counter" / file).read_text()
