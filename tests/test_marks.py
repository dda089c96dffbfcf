"""Tests with marks stand where the Makefile looks for them, so that none is left out of `make test`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"mark\.(slow|e2e|chaos|fuzz)\b")
# Its parameters bring marks; who imports it is looked for by its name.
SIEGE = "sandbox_siege"


def commands(target: str) -> str:
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    return next(line for line in done.stdout.splitlines() if " -m pytest " in line)


def files(mark: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(
            rf"mark\.{mark}\b" + (f"|import.*{SIEGE}|from {SIEGE}" if mark == "slow" else ""),
            path.read_text(),
        )
    }


def test_helpers_bring_no_marks() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        if not path.name.startswith("test_") and path.stem != SIEGE:
            assert not MARK.search(path.read_text()), f"the Makefile does not look into {path}"


def test_every_file_with_a_mark_is_named() -> None:
    for target, mark in (
        ("test-slow", "slow"),
        ("test-e2e", "e2e"),
        ("test-chaos", "chaos"),
        ("test-fuzz", "fuzz"),
    ):
        here = str(Path(__file__).relative_to(ROOT))
        named = set(re.findall(r"tests/[\w/]+\.py", commands(target)))
        assert files(mark) <= named | {here}, target
        assert len(named) < 80


def test_fast_tests_leave_out_files_that_have_none() -> None:
    ignored = set(re.findall(r"--ignore=(tests/[\w/]+\.py)", commands("test-fast")))
    assert "tests/sandbox/test_sandbox_attacks_suite.py" in ignored
    for name in ignored:
        (line,) = [line for line in (ROOT / name).read_text().splitlines() if line.startswith("pytestmark")]
        assert MARK.search(line)
