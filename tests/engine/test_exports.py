"""Exports for other frameworks play as the sandbox does: the same seeds, the same transcripts."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import gymnasium
import pyarrow.parquet
import pytest
from gymnasium.utils.env_checker import check_env
from scenes.programs import ECHO, LEVERS, PEAK
from test_envs import catalogue_of, story

from engine.errors import ConfigError
from engine.exports import dataset
from engine.exports.archive import Archive, BlockingPool
from engine.exports.gymnasium_env import SandboxedEnv, register
from engine.records.envs import MANIFEST

PROGRAMS = {"00000-peak-a": PEAK, "00001-levers-b": LEVERS, "00002-echo-c": ECHO}
ACTIONS = ("3", "4", "5", "6")
TURNS = 3
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

Transcript = list[tuple[str, float | None, bool]]


@pytest.fixture(scope="module")
def pool() -> Iterator[BlockingPool]:
    with BlockingPool() as opened:
        yield opened


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    for name, source in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(source)
    rows = [{"file": f"{name}.py", "hint": "Look."} for name in PROGRAMS]
    (tmp_path / MANIFEST).write_text(json.dumps({"max_turns": TURNS, "environments": rows}))
    return tmp_path


def played(pool: BlockingPool, source: str, seed: int) -> Transcript:
    """Return the answers of the sandbox itself: text, reward, whether it is over."""
    instance = pool.spawn(source, TURNS)
    found: Transcript = [(pool.call(instance.reset, seed), None, False)]
    for turn, action in enumerate(ACTIONS, start=1):
        answer = pool.call(instance.step, action)
        found.append((answer.observation, answer.reward, answer.terminated or turn == TURNS))
        if found[-1][2]:
            break
    pool.call(instance.close)
    return found


@pytest.fixture
async def server(exported: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The export, served by uvicorn in a thread."""
    pytest.importorskip("openenv", reason="needs the package openenv")
    import uvicorn

    from engine.exports import openenv_server

    monkeypatch.setenv(openenv_server.DIRECTORY, str(exported))
    running = uvicorn.Server(uvicorn.Config(openenv_server.app, factory=True, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        with anyio.fail_after(30):
            while not running.started:  # noqa: ASYNC110 - it is a thread
                await anyio.sleep(0.02)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        running.should_exit = True
        await anyio.to_thread.run_sync(thread.join)


async def test_an_openenv_session_plays_as_the_sandbox(server: str, pool: BlockingPool) -> None:
    from openenv import GenericEnvClient

    for seed, (name, source) in enumerate(PROGRAMS.items()):
        async with GenericEnvClient(base_url=server) as client:
            result = await client.reset(seed=seed, program=name)
            found: Transcript = [(result.observation["text"], result.reward, result.done)]
            for action in ACTIONS:
                result = await client.step({"text": action})
                found.append((result.observation["text"], result.reward, result.done))
                if result.done:
                    break
            assert found == await anyio.to_thread.run_sync(played, pool, source, seed)
            assert (await client.state())["program"] == name
            drawn = await client.reset(seed=seed)
            assert drawn.observation["text"] == found[0][0], "the seed picks the program, too"
            with pytest.raises(Exception, match="There is no program 'nope'"):
                await client.reset(seed=seed, program="nope")


class Script:
    """The agent of a verifiers episode: it says the same whatever it sees."""

    def __init__(self) -> None:
        self.saw: list[str] = []
        self.total: float | None = None
        self.player = self.trace = self

    @asynccontextmanager
    async def interaction(self, _task: object) -> AsyncIterator[Script]:
        yield self

    async def turn(self, payload: str) -> Any:
        self.saw.append(json.loads(payload)["observation"]["text"])
        return SimpleNamespace(terminated=False, last_reply=ACTIONS[len(self.saw) - 1])

    def record_reward(self, _name: str, total: float) -> None:
        self.total = total


async def test_verifiers_plays_the_server(server: str, pool: BlockingPool) -> None:
    openenv = pytest.importorskip("verifiers.v1.tasksets.openenv", reason="needs the package verifiers")
    resets = [{"seed": seed, "program": name} for seed, name in enumerate(PROGRAMS)]
    tasks = list(openenv.OpenEnvTaskset(openenv.OpenEnvConfig(base_url=server, resets=resets)))
    assert len(tasks) == len(PROGRAMS)
    for seed, (task, source) in enumerate(zip(tasks, PROGRAMS.values(), strict=True)):
        agent = Script()
        await openenv.OpenEnvEnv.run(None, task, agent)
        expected = await anyio.to_thread.run_sync(played, pool, source, seed)
        assert agent.saw == [text for text, _, over in expected if not over]
        assert agent.total == sum(reward or 0.0 for _, reward, _ in expected)


def test_a_data_set_has_the_programs_with_their_episodes(tmp_path: Path) -> None:
    with catalogue_of(tmp_path, story()) as catalogue:
        target = tmp_path / "data"
        assert dataset.write(catalogue, catalogue.select(), target, "toy") == len(catalogue.entries)
        lines = (target / dataset.JSONL).read_text().splitlines()
        rows = pyarrow.parquet.read_table(target / dataset.PARQUET).to_pylist()
        assert [json.loads(line) for line in lines] == rows
        for row, entry in zip(rows, catalogue.select(), strict=True):
            assert (row["source"], row["hint"]) == tuple(catalogue.program(entry))
            assert (row["design"], row["win"], row["regret_low"]) == (
                entry.design,
                entry.win,
                entry.regret_low,
            )
        assert rows[0]["episodes"][0]["turns"][0].keys() == {"observation", "reply", "action", "reward"}
    card = (target / dataset.CARD).read_text()
    assert "data_files: environments.parquet" in card
    assert "Skills: Logical Deduction, Optimization." in card


def test_the_archive_is_what_was_written(exported: Path) -> None:
    archive = Archive.read(exported)
    assert archive.max_turns == TURNS
    assert {one.name: one.source for one in archive.programs} == PROGRAMS


def test_gymnasium_plays_as_the_sandbox(exported: Path, pool: BlockingPool) -> None:
    for name, source in zip(register(exported), PROGRAMS.values(), strict=True):
        with gymnasium.make(name, pool=pool) as env:
            for seed in range(3):
                text, info = env.reset(seed=seed)
                assert info["hint"] == "Look."
                found: Transcript = [(text, None, False)]
                over = False
                while not over:
                    text, reward, terminated, truncated, _ = env.step(ACTIONS[len(found) - 1])
                    over = terminated or truncated
                    found.append((text, reward, over))
                assert found == played(pool, source, seed)
                assert terminated is not truncated


def test_it_keeps_the_rules_of_gymnasium(pool: BlockingPool) -> None:
    check_env(SandboxedEnv(SUM, "Add.", 3, pool), skip_render_check=True)


def test_an_environment_of_its_own_ends_with_its_processes() -> None:
    env = SandboxedEnv(SUM)
    assert env.reset(seed=1)[0] == env.reset(seed=1)[0]
    assert env.step("raise") == ("", 0.0, True, False, {"error": "ValueError: asked for"})
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("1")
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
