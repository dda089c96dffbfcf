"""An update that half succeeds, over real HTTP: no token bears the name of weights that did not sample it."""

from __future__ import annotations

import itertools
from pathlib import Path

import anyio
import pytest
from scenes.fake_vllm import STOP, fake_vllm, logprob, policy, until
from server_stage import Stage, on_stage

import roles.server.role as server_role
from bus.messages import ServerServing
from engine.config import SamplingConfig
from engine.inference.completion import Completion
from engine.inference.pool import InferencePool


class Players:
    """Samples all the time, and judges every completion by what the fakes' weights really were."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.pool = stage, InferencePool(max_concurrency=8, request_seconds=20.0)
        self.found: list[Completion] = []

    async def play(self, key: str) -> None:
        for turn in itertools.count():
            completion = await self.pool.generate(
                [1, 2], sampling=SamplingConfig(max_tokens=8), key=key, stop_token_ids=[STOP]
            )
            self.judge(completion, f"{key}, turn {turn}")

    def judge(self, completion: Completion, who: str) -> None:
        acknowledged = {fact.version for fact in self.stage.facts if isinstance(fact, ServerServing)}
        for span in completion.spans:
            assert span.version in acknowledged, f"{who}: nobody has announced {span.version} yet"
            for token, said in zip(
                completion.tokens[span.start : span.stop],
                completion.logprobs[span.start : span.stop],
                strict=True,
            ):
                assert said == pytest.approx(logprob(token, str(span.version))), f"{who}: {span} is a lie"
        self.found.append(completion)

    def versions(self) -> set[int]:
        return {span.version for completion in self.found for span in completion.spans}

    async def more(self, count: int = 12) -> None:
        goal = len(self.found) + count
        await until(lambda: len(self.found) >= goal)


async def test_a_half_applied_update_leaves_no_mislabelled_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A acknowledges; B answers 500 in the middle of the load, then hangs in it, then does it."""
    monkeypatch.setattr(server_role, "LONGEST_BACKOFF", 0.01)
    settings = {"pace": 0.005, "tokens": 6}
    async with fake_vllm(**settings) as a, fake_vllm(**settings) as b:
        stage = Stage(tmp_path, (a.url, b.url), start_seconds=0.5)
        players = Players(stage)
        async with on_stage(stage), anyio.create_task_group() as tasks:
            tasks.start_soon(players.pool.watch, stage.bus.peer("agent", "agent-0"))
            await stage.bus.publish(policy(1))
            await stage.until(lambda facts: len(facts) == 2)
            await until(lambda: players.pool.statistics()["serving"] == 2)
            for index in range(6):
                tasks.start_soon(players.play, f"episode-{index}")
            await players.more()
            assert players.versions() == {1}
            b.faults["/update_weights"] = ["load:500", "load:hang"]
            await until(lambda: a.midway > 0)
            a.hold.clear()  # the update shall hit requests that have sampled something
            await stage.bus.publish(policy(2))
            await until(lambda: a.version == "2")
            a.hold.set()
            await stage.served(2)
            await until(lambda: b.half_loads == 1)
            assert (a.version, b.version, b.loaded, b.paused) == ("2", "1", "rubble", True)
            await players.more()  # A alone bears it, while B is broken
            assert b.running == 0 or b.paused
            await until(lambda: b.half_loads == 2)
            await players.more()
            again = {"server": "server-0-1", "version": 2}
            await stage.until(lambda facts: any(again.items() <= _fields(fact).items() for fact in facts))
            await until(lambda: players.pool.statistics()["serving"] == 2)
            for index in range(6):  # the others stay with A, where their prefixes are
                tasks.start_soon(players.play, f"late-{index}")
            await players.more(24)
            assert (b.version, b.loaded, b.paused, b.session_open) == ("2", "2", False, False)
            statistics = players.pool.statistics()
            assert statistics["server-0-1.answers"] > 0
            assert [fact.server for fact in stage.lost()] == ["server-0-1"], "announced once, lost once"
            assert players.versions() == {1, 2}
            tasks.cancel_scope.cancel()
        assert players.pool.statistics()["in_flight"] == 0
        assert any(len(completion.spans) == 2 for completion in players.found), "updates hit requests"


async def test_a_label_that_was_a_lie_for_a_while_is_on_no_token(tmp_path: Path) -> None:
    """The first load did nothing but move the label; the canary finds it, and the second load cures it."""
    async with fake_vllm(pace=0.002) as a, fake_vllm(pace=0.002) as b:
        stage = Stage(tmp_path, (a.url, b.url))
        players = Players(stage)
        async with on_stage(stage), anyio.create_task_group() as tasks:
            tasks.start_soon(players.pool.watch, stage.bus.peer("agent", "agent-0"))
            await stage.bus.publish(policy(1))
            await stage.until(lambda facts: len(facts) == 2)
            for index in range(6):
                tasks.start_soon(players.play, f"episode-{index}")
            await players.more()
            a.stale_loads, a.score_seconds = 1, 0.1
            await stage.bus.publish(policy(2))
            await until(lambda: a.version == "2" and a.loaded == "1")
            await until(lambda: players.pool.statistics()["unproved"] >= 1)
            await stage.until(lambda facts: len(facts) == 4)
            await players.more(24)
            assert players.versions() == {1, 2}
            epochs = [fact.epoch for fact in stage.facts if fact.server == "server-0-0"]
            assert epochs[0] != epochs[1], "others throw away what they hold back"
            assert players.pool.statistics()["moved"] >= 1
            tasks.cancel_scope.cancel()


def _fields(fact: object) -> dict[str, object]:
    return {name: getattr(fact, name) for name in ("server", "version") if hasattr(fact, name)}
