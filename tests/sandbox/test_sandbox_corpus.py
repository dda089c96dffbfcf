"""Programs in the style a model writes, good and bad: each says in its header on which rung it ends.

``# rung:`` names the rung, ``# reason:`` words of the reason, ``# degenerate:`` and ``# tools:`` what the
verdict must say about them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from scenes.sandboxes import held_pool

from sandbox import RUNGS, SandboxPool, SandboxSettings, Validator

PROGRAMS = sorted((Path(__file__).parent / "corpus").glob("*.py"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[SandboxPool]:
    settings = SandboxSettings(zygotes=2, cpu_call_seconds=0.2, cpu_load_seconds=0.3, strikes=0, nice=0)
    async with held_pool(settings) as pool:
        yield pool


def read(path: Path) -> tuple[dict[str, str], str]:
    """The header's fields and the program without its header."""
    lines = path.read_text().splitlines(keepends=True)
    header = {}
    while lines and lines[0].startswith("# "):
        key, _, value = lines.pop(0)[2:].partition(":")
        header[key] = value.strip()
    return header, "".join(lines)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
async def test_program_ends_on_its_rung(pair: SandboxPool, path: Path) -> None:
    header, source = read(path)
    found = await Validator(pair).validate(source, max_turns=25)
    assert found.rung == header["rung"], found
    assert header.get("reason", "") in found.reason
    assert found.ok is (found.rung == "accepted")
    assert found.degenerate is (header.get("degenerate") == "yes"), (found.hack, found.policies)
    assert found.tools is (header.get("tools") == "yes") or not found.ok
    if found.degenerate and "nothing tells" not in found.hack:
        assert found.trivial_win_rate >= 0.25
        assert found.trivial_interval[0] <= found.trivial_win_rate <= found.trivial_interval[1]
        assert found.hack


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_the_examples_of_the_documentation_are_good(pair: SandboxPool) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    indented = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", page, re.MULTILINE)
    programs = [textwrap.dedent(block) for block in indented if "class " in block]
    assert len(programs) == 2
    for source in programs:
        found = await Validator(pair).validate(source, max_turns=25)
        assert (found.rung, found.degenerate) == ("accepted", False), found


def test_the_corpus_has_programs_for_every_rung() -> None:
    rungs = {read(path)[0]["rung"] for path in PROGRAMS}
    # the others need checks of the caller's, or flags turned into rejections
    assert rungs == set(RUNGS) - {"trivial", "off_ticket", "incoherent", "duplicate", "judge"}
    assert len(PROGRAMS) >= 60
