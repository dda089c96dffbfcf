"""Every prompt as it was when its version was given out, and every program in one."""

from __future__ import annotations

import ast
import re

import pytest
from prompt_cases import GOLDEN, golden, render, variables

from engine import prompts
from engine.errors import ConfigError
from roles.designer.prompt import VARIANTS
from sandbox import RUNGS, SandboxPool, SandboxSettings, Validator, ValidatorSettings
from sandbox.contract import STDLIB
from sandbox.lint import lint

_FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DESIGNS = ("design_full", "design_tools")


@pytest.mark.parametrize("name", prompts.names())
def test_a_prompt_that_changes_gets_a_new_version(name: str) -> None:
    """When this fails: raise the number in the template's first line, then run prompt_cases.py."""
    assert golden(name).exists(), f"{golden(name).name} is missing: write it with prompt_cases.py"
    assert render(name) == golden(name).read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {golden(name).name for name in prompts.names()}


def test_versions() -> None:
    assert re.fullmatch(r"design_full/\d+", prompts.version("design_full"))
    assert prompts.version("design_nano") == "design_nano/1"
    with pytest.raises(ConfigError, match="design_full"):
        prompts.version("design_huge")
    assert not any(name.startswith("_") for name in prompts.names())


@pytest.mark.parametrize("name", prompts.names())
def test_a_variable_that_is_missing_is_named(name: str) -> None:
    needed = {"design": "skill", "judge": "source", "hint": "source", "play": "observation"}
    missing = needed[name.partition("_")[0]]
    given = variables(name)
    del given[missing]
    with pytest.raises(ConfigError, match=missing):
        prompts.render(name, **given)


@pytest.mark.slow
@pytest.mark.parametrize("max_turns", [4, 25])
@pytest.mark.parametrize("name", DESIGNS)
async def test_every_program_in_a_prompt_is_accepted(name: str, max_turns: int) -> None:
    programs = _FENCE.findall(render(name, memory=[], max_turns=max_turns))
    assert len(programs) == 1
    strict = ValidatorSettings(garbage="strict", degenerate="reject", coin_seeds=32)
    async with SandboxPool(SandboxSettings(zygotes=1, nice=0)) as pool:
        verdict = await Validator(pool, strict).validate(programs[0], max_turns=max_turns)
    assert (verdict.rung, verdict.reason) == (RUNGS[-1], "")
    assert verdict.tools is (name == "design_tools")
    assert verdict.solvable
    assert verdict.ends
    found = verdict.metadata
    assert found is not None
    assert (found.skill, found.difficulty) == ("Logical Deduction", 0.4)
    assert found.goal
    assert found.max_turns is not None
    assert found.max_turns <= max_turns


def test_a_skill_with_quotes_stays_one_text_in_the_program() -> None:
    (program,) = _FENCE.findall(render("design_full", skill='Saying "no"', memory=[]))
    assert 'Saying "no"' in {
        node.value for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Constant)
    }


def test_the_prompt_offers_what_the_sandbox_takes() -> None:
    offered = prompts.imports(("numpy",))
    assert "numpy" in offered
    assert {"math", "random", "collections", "heapq"} <= set(offered)
    assert set(offered) - {"numpy"} <= set(STDLIB)
    assert not {"threading", "os", "sys", "time", "asyncio", "io", "pathlib"} & set(offered)
    source = "\n".join(f"import {name}" for name in offered)
    assert lint(ast.parse(source), (*STDLIB, "numpy")) == ""
    text = render("design_full", imports=offered)
    assert ", ".join(offered) in text
    assert "asyncio" in text


def test_each_variant_of_a_task_with_tools_is_asked_for_in_words_of_its_own() -> None:
    texts = {name: render("design_tools", variant=name) for name in sorted(set(VARIANTS))}
    assert len(set(texts.values())) == 4
    assert all(
        text.count("`REPLY`") >= 2 for name, text in texts.items() if name in ("missing", "irrelevant")
    )
    named = re.compile(r"bfcl|tau|acebench|vitabench|mcp|benchmark", re.IGNORECASE)
    assert not any(named.search(text) for text in texts.values())
