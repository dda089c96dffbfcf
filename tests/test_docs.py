"""The documentation shows the files of its example whole, and the picture that its script draws."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
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


def test_the_page_of_settings_is_up_to_date() -> None:
    script = runpy.run_path(str(DOCS / "write_settings.py"))
    assert (DOCS / "settings.md").read_text() == script["page"](), "run python docs/write_settings.py"


def test_the_results_page_shows_the_table_of_its_records() -> None:
    said, table, *_ = (DOCS / "results" / "nano" / "table.md").read_text().split("\n\n")
    assert f"{said}\n\n{table}\n" in (DOCS / "results.md").read_text()


def test_the_picture_is_up_to_date() -> None:
    script = runpy.run_path(str(DOCS / "draw_architecture.py"))
    assert (DOCS / "architecture.svg").read_text() == script["draw"](), "run python docs/draw_architecture.py"


@pytest.mark.parametrize(("block", "printed"), [(0, ["Heads or tails?", "True"]), (1, ["False"])])
def test_the_blocks_of_the_python_page_run(block: int, printed: list[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "api.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", blocks[block]], capture_output=True, text=True, check=True)
    for part in printed:
        assert part in done.stdout


def test_every_block_of_the_python_page_is_valid() -> None:
    for block in re.findall(r"```python(?: norun)?\n(.*?)```", (DOCS / "api.md").read_text(), re.DOTALL):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for name in node.names:
                    exec(f"from {node.module} import {name.name}")
