"""The programmatic gates on forty tool environments that people wrote."""

from __future__ import annotations

import pytest
from tool_corpus import BROKEN, GOOD

from sandbox import SandboxPool, SandboxSettings, Validator, ValidatorSettings, Verdict


async def verdicts(programs: dict[str, str]) -> dict[str, Verdict]:
    settings = SandboxSettings(preload=())
    async with SandboxPool(settings) as pool:
        validator = Validator(pool, ValidatorSettings(salt="corpus"))
        return {name: await validator.validate(source) for name, source in programs.items()}


@pytest.mark.timeout(300)
async def test_no_good_environment_is_rejected_or_called_degenerate() -> None:
    assert len(GOOD) == 20
    found = await verdicts(GOOD)
    assert {name: one.reason for name, one in found.items() if not one.ok} == {}
    assert {name: one.hack for name, one in found.items() if one.hack} == {}


@pytest.mark.timeout(300)
async def test_broken_environments_are_rejected_by_the_criteria() -> None:
    assert len(BROKEN) == 20
    found = await verdicts(BROKEN)
    wrong = {name for name, one in found.items() if one.ok}
    assert len(wrong) <= 4, wrong
    assert {one.rung for one in found.values() if not one.ok} <= {"criteria", "replay", "step"}


async def test_reasons_tell_what_is_wrong() -> None:
    words = {
        "underivable: a hidden word": "which nothing tells the player",
        "presatisfied: true before its turn": "criterion 2 is true before its turn",
        "never succeeds: raises always": "the mixer is broken",
        "type: list and tuple": "no call of the plan makes criterion 1 true",
    }
    found = await verdicts({name: BROKEN[name] for name in words})
    assert [name for name, text in words.items() if text not in found[name].reason] == []
