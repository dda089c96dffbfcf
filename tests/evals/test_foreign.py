"""Environments by others: the adapters beside small fakes; end to end, every one of them in the sandbox."""

from __future__ import annotations

import ast
import sys
import types
from collections import Counter
from typing import Any

import pytest

from engine import pools
from engine.evals import external_benchmarks
from sandbox import EnvError, SandboxPool, SandboxSettings, contract
from sandbox.lint import lint


class Data:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"question": f"level {self.config.get('level')} seed {self.config['seed']}", "answer": "7"}

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        return 1.0 if answer == entry["answer"] else 0.01


class Curriculum:
    level = 0

    def __init__(self, levels: int) -> None:
        self.attributes = {"size": types.SimpleNamespace(levels=list(range(levels)))}

    def set_global_level(self, level: int) -> None:
        self.level = level

    def generate_configuration(self, defaults: dict[str, Any]) -> dict[str, Any]:
        return {**defaults, "level": self.level}


class Game:
    def reset(self, seed: int) -> tuple[str, dict[str, str]]:
        return f"game {seed}", {"suffix": "Your move."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, str]]:
        return f"got {action}", 1.0, True, False, {"suffix": "Over."}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the packages: four datasets (one with two levels, one without answers), two games."""
    factory: Any = types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {
        name: (lambda config: Data(config),) for name in ("word_sums", "plain", "rush_hour", "composite")
    }
    factory.has_curriculum = lambda name: name == "word_sums"
    factory.create_curriculum = lambda name: Curriculum(2)
    reasoning_gym: Any = types.ModuleType("reasoning_gym")
    reasoning_gym.create_dataset = lambda name, **config: Data(config)
    registration: Any = types.ModuleType("gem.envs.registration")
    registration.ENV_REGISTRY = dict.fromkeys(
        ("game:Sokoban-v0-easy", "game:Crosswords-v0-easy", "rg:word_sums", "math:GSM8K")
    )
    gem: Any = types.ModuleType("gem")
    gem.make = lambda name: Game()
    for module in (factory, reasoning_gym, registration, gem):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def load(source: str) -> Any:
    assert lint(ast.parse(source), (*contract.STDLIB, "reasoning_gym", "gem")) == ""
    module = types.ModuleType(contract.MODULE)
    contract.namespace(module)
    exec(source, module.__dict__)
    return contract.construct(contract.find_class(module), {})


@pytest.mark.usefixtures("fakes")
def test_datasets_become_programs() -> None:
    programs = list(external_benchmarks.reasoning_gym_programs())
    assert [(program.name, program.level) for program in programs] == [
        ("plain", "as it comes"),
        ("rush_hour", "as it comes"),
        ("word_sums", "as it comes"),
        ("word_sums", "level 0"),
        ("word_sums", "level 1"),
    ]
    env = load(programs[-1].source)
    assert type(env).__name__ == "WordSumsEnv"
    assert contract.read_reset(env.reset(5)) == "level 1 seed 5"
    assert contract.read_step(env.step("8"))[1:4] == (0.01, True, False)
    assert contract.read_step(env.step(env.solution()[0]))[1:4] == (1.0, True, False)
    assert not hasattr(load(programs[1].source), "solution")
    assert load(programs[2].source).reset(5)[0] == "level None seed 5"


@pytest.mark.usefixtures("fakes")
def test_games_become_programs() -> None:
    (program,) = external_benchmarks.gem_programs()
    assert (program.name, program.level) == ("Sokoban", "easy")
    env = load(program.source)
    assert contract.read_reset(env.reset(3)) == "game 3\nYour move."
    assert contract.read_step(env.step("up"))[0] == "got \\boxed{up}\nOver."


def test_settings_load_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_benchmarks, "installed", lambda package: package == "gem")
    made = external_benchmarks.settings(SandboxSettings(memory_mb=99))
    assert made.preload == ("numpy", pools.THREADLESS, external_benchmarks.HELD, "gem")
    assert made.memory_mb == 99
    assert external_benchmarks.settings(made).preload == made.preload


# Configurations that the generators themselves refuse, with their own words: theirs, not ours.
REFUSED = {
    ("caesar_cipher", "level 2"): "rotation must be in range",
    ("knight_swap", "level 0"): "min_nodes must be",
    ("knight_swap", "level 1"): "min_nodes must be",
    ("knight_swap", "level 2"): "min_nodes must be",
    ("modulo_grid", "level 1"): "max_target must be",
    ("survo", "level 2"): "max_empty must be",
    ("FifteenPuzzle", "random"): "NoneType",
}


# Least numbers of programs that step, and that their stored answer wins; gem's games store none.
STEPPED = {"reasoning_gym": 380, "gem": 30}
WON = 350


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not external_benchmarks.installed("reasoning_gym"), reason="the extra reasoning-gym is not installed"
)
async def test_environments_by_others_run_in_the_sandbox(capsys: pytest.CaptureFixture[str]) -> None:
    programs = list(external_benchmarks.reasoning_gym_programs())
    if external_benchmarks.installed("gem"):
        programs += external_benchmarks.gem_programs()
    assert len({program.source for program in programs}) == len(programs)
    counts: Counter[str] = Counter()
    settings = external_benchmarks.settings(
        SandboxSettings(zygotes=1, memory_mb=512, cpu_load_seconds=20, cpu_call_seconds=10, start_seconds=180)
    )
    async with SandboxPool(settings) as pool:
        for program in programs:
            await _try_out(pool, program, counts)
        assert pool.statistics()["live"] == 0
    with capsys.disabled():
        print(f"\nenvironments by others: {dict(counts)}")
    packages = Counter(program.package for program in programs)
    assert set(packages) == {package for package in STEPPED if external_benchmarks.installed(package)}
    assert counts["stepped"] >= sum(STEPPED[package] for package in packages)
    assert counts["won by the stored answer"] >= WON
    assert counts["lost by the stored answer"] == 0


async def _try_out(pool: SandboxPool, program: external_benchmarks.Foreign, counts: Counter[str]) -> None:
    """Load, reset, step with a wrong answer and, where one is stored, with the right one."""
    refusal = REFUSED.get((program.name, program.level))
    if refusal is not None:
        with pytest.raises(EnvError, match=refusal):
            await pool.spawn(program.source, seed=3)
        counts["refused by their generator"] += 1
        return
    await pool.lint(program.source)
    async with await pool.spawn(program.source, seed=3) as instance:
        assert instance.first.strip()
        if program.name == "prime_factorization":
            # it turns an answer into a number before it looks at it
            with pytest.raises(EnvError, match="ValueError"):
                await instance.step("nothing of the kind")
        else:
            paid = (await instance.step("nothing of the kind")).reward >= 1
            # it takes whatever is not "True" for "False"
            assert not paid or program.name == "game_of_life_halting"
        counts["stepped"] += 1
        if "solution" not in instance.calls:
            counts["without a stored answer"] += 1
            return
        answer = (await instance.call("solution"))[0]
        if answer is None:
            counts["without a stored answer"] += 1
            return
        await instance.reset(3)
        won = (await instance.step(str(answer))).reward >= 1
        counts["won by the stored answer" if won else "lost by the stored answer"] += 1
