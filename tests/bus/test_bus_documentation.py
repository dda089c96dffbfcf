"""The examples of docs/bus.md run and print the output shown there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bus.subjects import CONSUMERS, STREAMS

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "bus.md"
_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
BLOCKS = [(match[1], match[2] or "") for match in _BLOCK.finditer(PAGE.read_text())]


def test_the_page_has_examples() -> None:
    assert len(BLOCKS) >= 2
    assert PAGE.read_text().count("```") == 2 * sum(1 + bool(output) for _, output in BLOCKS)


@pytest.mark.parametrize(("program", "output"), BLOCKS, ids=range(len(BLOCKS)))
def test_examples_run_as_they_stand(program: str, output: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(PAGE.parent.parent)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (result.returncode, result.stdout) == (0, output), result.stderr


def test_the_tables_name_what_there_is() -> None:
    rows = re.findall(r"^\| `([A-Z]+)` \|.*\| ([\d.]+) % \|$", PAGE.read_text(), re.MULTILINE)
    assert {name: float(share) for name, share in rows} == {
        stream.kind: round(100 * stream.share, 1) for stream in STREAMS.values()
    }
    for name in CONSUMERS:
        assert f"`{name}`" in PAGE.read_text()
