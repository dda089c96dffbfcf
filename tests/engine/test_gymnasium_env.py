"""Exported programs as Gymnasium environments: the same transcripts as in the sandbox itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from engine.errors import ConfigError
from engine.exports.archive import BlockingPool
from engine.exports.gymnasium_env import SandboxedEnv, register
from engine.records.envs import MANIFEST
from sandbox import EnvError

SUM = """
import random

class SumEnv:
    def reset(self, seed=None):
        draw = random.Random(seed)
        self.left, self.terms = 3, [draw.randint(1, 9) for _ in range(2)]
        return f"{self.terms[0]} + {self.terms[1]} = ? \\u2713", {}

    def step(self, action):
        if action == "raise":
            raise ValueError("asked for")
        self.left -= 1
        right = action == str(sum(self.terms))
        return "right" if right else f"no, {self.left} left", float(right), right, False, {}
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[BlockingPool]:
    with BlockingPool() as opened:
        yield opened


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    (tmp_path / "00001-sums-abc.py").write_text(SUM)
    rows = [{"file": "00001-sums-abc.py", "hint": "Add."}]
    (tmp_path / MANIFEST).write_text(json.dumps({"max_turns": 3, "environments": rows}))
    return tmp_path


def test_an_exported_program_plays_as_in_the_sandbox(exported: Path, pool: BlockingPool) -> None:
    (name,) = register(exported)
    with gymnasium.make(name, pool=pool) as env:
        for seed in range(3):
            instance = pool.spawn(SUM, 3)
            observation, info = env.reset(seed=seed)
            assert observation == pool.call(instance.reset, seed)
            assert info["hint"] == "Add."
            for action in ("1", "2", "3"):
                ours = pool.call(instance.step, action)
                played = env.step(action)
                assert played[:3] == (ours.observation, ours.reward, ours.terminated)
            assert played[3] is not played[2], "the third turn is the last"
            pool.call(instance.close)


def test_it_keeps_the_rules_of_gymnasium(pool: BlockingPool) -> None:
    check_env(SandboxedEnv(SUM, "Add.", 3, pool), skip_render_check=True)


def test_an_environment_of_its_own_ends_with_its_processes() -> None:
    env = SandboxedEnv(SUM)
    assert env.reset(seed=1)[0] == env.reset(seed=1)[0]
    with pytest.raises(EnvError, match="asked for"):
        env.step("raise")
    assert env.reset(seed=2)[0].endswith("= ? \u2713")
    env.close()
    env.close()


def test_a_step_before_the_reset_and_a_directory_without_manifest_are_refused(
    pool: BlockingPool, tmp_path: Path
) -> None:
    with pytest.raises(gymnasium.error.ResetNeeded):
        SandboxedEnv(SUM, pool=pool).step("1")
    with pytest.raises(ConfigError, match="no readable manifest"):
        register(tmp_path)
    (tmp_path / MANIFEST).write_text(
        json.dumps({"max_turns": 3, "environments": [{"file": "gone.py", "hint": ""}]})
    )
    with pytest.raises(ConfigError, match=r"gone\.py"):
        register(tmp_path)
