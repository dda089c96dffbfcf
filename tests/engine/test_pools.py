"""Pools of environments by others: each package for real, in the sandbox, twice alike."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from scenes.sandboxes import replay

from engine import pools
from engine.errors import ConfigError
from roles.designer.environment_pool import read
from sandbox import SandboxPool, SandboxSettings
from sandbox.probes import Transcript

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = ROOT / "tests" / "scenes" / "foreign"
LAUNCHER = ("env", f"PYTHONPATH={ROOT}{os.pathsep}{FOREIGN}")
SEEDS = 3
Answer = Callable[[str], list[str]]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOREIGN))


async def played(source: str, answer: Answer) -> dict[str, list[Transcript]]:
    """Return what came of ``answer`` to the first observation: each program on some seeds, twice alike."""
    settings = SandboxSettings(zygotes=1, preload=("numpy", *pools.preload(source)), start_seconds=180)
    found: dict[str, list[Transcript]] = {}
    async with SandboxPool(settings, launcher=LAUNCHER) as pool:
        for name, program in read(source):
            await pool.lint(program)
            for seed in range(SEEDS):
                actions = answer((await replay(pool, program, seed, ())).first)
                once, again = [await replay(pool, program, seed, actions) for _ in range(2)]
                assert (once, once.error) == (again, ""), (name, once.error)
                found.setdefault(name, []).append(once)
    return found


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


async def test_classes_of_trl() -> None:
    def add(first: str) -> list[str]:
        (want,) = numbers(first)
        call = '{"name": "add", "arguments": {"count": %s}}'
        return [
            call % 0,
            '{"name": "steal", "arguments": {}}',
            call % (want - 1),
            call % 1,
            '{"name": "ad',
            "Done.",
        ]

    (plays,) = (await played("trl:till_trl:Till", add)).values()
    for play in plays:
        assert "\n\nTools:\n- add(count: 'int') -> 'str': Put figs into the basket.\n\n" in play.first
        assert [step.observation for step in play.steps[:2]] == [
            "Error in add: ValueError('count must be at least 1')",
            "Error in steal: KeyError('steal')",
        ]
        assert (play.steps[3].observation, play.ended, play.returned) == (
            f"{numbers(play.first)[0]} figs",
            True,
            1.0,
        )
    assert len({play.first for play in plays}) > 1
    with pytest.raises(ConfigError, match="must have reset, get_reward"):
        list(read("trl:till_trl:Rewardless"))
    with pytest.raises(ConfigError, match="'till_trl:Gone' cannot be imported"):
        list(read("trl:till_trl:Gone"))


async def test_environments_of_gymnasium() -> None:
    pytest.importorskip("gymnasium")
    found = await played(
        "gymnasium:FrozenLake-v1,Blackjack-v1", lambda first: ["jump", *(["1"] * 30 if "F" in first else "0")]
    )
    lake, cards = found["gymnasium/FrozenLake-v1"], found["gymnasium/Blackjack-v1"]
    assert lake[0].first.startswith("\n[S]FFF\nFHFH\n")
    assert lake[0].first.endswith("An action is a number from 0 to 3.")
    assert all(play.ended and play.steps[0].observation == "That is no action." for play in lake + cards)
    assert {abs(play.steps[-1].reward) for play in cards} <= {0.0, 1.0}
    for name in ("gymnasium:Nothing-v9", "gymnasium:", "gymnasium:Pendulum-v1"):
        with pytest.raises(ConfigError):
            list(read(name))


@pytest.mark.timeout(240)
async def test_games_of_textarena() -> None:
    pytest.importorskip("textarena", reason="needs the package textarena: make test-frameworks")
    games = "textarena:GuessTheNumber-v0,FrozenLake-v0,Minesweeper-v0-small"
    found = await played(games, lambda _: [str(number) for number in range(1, 21)])
    guesses = found["textarena/GuessTheNumber-v0"]
    assert "number between 1 and 20" in guesses[0].first.lower() or "1 and 20" in guesses[0].first
    assert all(play.ended for play in guesses)
    assert len(found) == 3
    assert len({name for name, _ in read("textarena:")}) >= 50
    with pytest.raises(ConfigError, match="has no Chess-v0"):
        list(read("textarena:Chess-v0"))


@pytest.mark.timeout(240)
async def test_task_sets_of_verifiers() -> None:
    pytest.importorskip("verifiers.v1", reason="needs the package verifiers: make test-frameworks")

    def answer(first: str) -> list[str]:
        if first.startswith("Guess"):
            return [*"12345"]
        total = sum(numbers(first))
        return ["99" if total < 40 else str(total)]

    found = await played("verifiers:sums_verifiers,guess_verifiers", answer)
    assert len(found) == 3, "sixteen sums, then four; five guesses"
    *sums, guesses = found.values()
    for play in (play for plays in sums for play in plays):
        assert play.first.startswith("Be short.\n\n")
        assert (play.ended, play.returned) == (True, 0.5 if sum(numbers(play.first)) < 40 else 1.0)
    assert {play.returned for plays in sums for play in plays} == {0.5, 1.0}
    for seed, play in enumerate(guesses):
        assert [step.observation for step in play.steps] == ["No."] * seed + [""]
        assert play.returned == 1.0
    with pytest.raises(ConfigError, match="cannot load the task set 'nothing-there'"):
        list(read("verifiers:nothing-there"))


@pytest.mark.timeout(240)
async def test_environments_of_openenv_servers() -> None:
    pytest.importorskip("openenv", reason="needs the package openenv: make test-frameworks")
    (plays,) = (
        await played("openenv:doors_openenv:Doors", lambda _: ["a", '{"number": 9}', *"123"])
    ).values()
    for play in plays:
        assert play.first.startswith("Three doors.\n\nFields of an action: ")
        assert [step.observation[:17] for step in play.steps[:2]] == ["That is no action", "a wall"]
        assert (play.steps[-1].observation, play.returned) == ("open", 1.0)
    with pytest.raises(ConfigError, match="is no Environment of OpenEnv"):
        list(read("openenv:doors_openenv:Door"))
