"""The rollout benchmark: both sides do the same work, and the whole of it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
from aiohttp import web

pytest.importorskip("torch")

from bus.messages import Span
from engine.bench import rollout, rollout_stage
from engine.bench.rollout_simulated import answer, application
from engine.config import SamplingConfig
from engine.errors import SpadeError
from engine.inference import vllm_schema
from engine.inference.completion import Completion

TAIL = (7, 8, 9)


@asynccontextmanager
async def simulated(delay: float = 0.0) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Run the simulated server here; yield its URL and the requests that it gets."""
    bodies: list[dict[str, Any]] = []

    @web.middleware
    async def remember(request: web.Request, handler: Any) -> web.StreamResponse:
        bodies.append(msgspec.json.decode(await request.read()))
        response: web.StreamResponse = await handler(request)
        return response

    app = application(delay, TAIL)
    app.middlewares.append(remember)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2]), bodies
    finally:
        await runner.cleanup()


def test_the_simulated_server_speaks_as_vllm_does() -> None:
    found = vllm_schema.completion(answer(6, TAIL), "here")
    assert found.tokens[-3:] == list(TAIL)
    assert len(found.tokens) == len(found.logprobs) == 6
    assert found.spans == (Span(0, 0, 6),)
    assert found.finish == "length"
    assert len(vllm_schema.completion(answer(2, TAIL), "here").tokens) == 2


class Pool:
    """Samples as many tokens as it is told, or one less."""

    def __init__(self, missing: int = 0) -> None:
        self.missing, self.stops = missing, [-1]

    async def generate(
        self, prompt: Sequence[int], *, sampling: SamplingConfig, stop_token_ids: Sequence[int], **_: Any
    ) -> Completion:
        self.stops = list(stop_token_ids)
        count = sampling.max_tokens - self.missing
        return Completion([5] * count, [-1.0] * count, (Span(0, 0, count),), "length")


async def test_the_actor_acts_with_the_length_that_was_asked_for() -> None:
    pool = Pool()
    actor = rollout_stage.Actor(pool, TAIL)  # type: ignore[arg-type]
    asked = {"sampling": SamplingConfig(max_tokens=10), "seed": None, "key": "e", "stop_token_ids": (2,)}
    said = await actor.generate([1, 2], **asked)  # type: ignore[arg-type]
    assert said.tokens == [5] * 7 + list(TAIL)
    assert said.finish == "stop"
    assert pool.stops == [], "no stop token shortens a reply"
    assert actor.asked == {"e": [([1, 2], 10)]}
    pool.missing = 1
    with pytest.raises(SpadeError, match="sampled 9 of 10"):
        await actor.generate([1, 2], **asked)  # type: ignore[arg-type]


async def test_the_bare_client_says_the_same_at_the_same_lengths() -> None:
    one, other = [1, 2, 3], [4, 5, 6, 7]
    prompts = [one, [*one, 30, 30, *TAIL, 11, 12], [*one, *([0] * 13), 13]]
    counts = [5, 6, 4]
    scripts = [list(map(rollout_stage.Asked, prompts, counts)), [rollout_stage.Asked(other, 5)]]
    async with simulated() as (url, bodies), aiohttp.ClientSession() as session:
        phase = await rollout_stage.Bare(url, session, TAIL).phase(scripts, concurrency=2)
    assert phase.turns == 4
    assert len(phase.ends) == 2
    seen = [body["token_ids"] for body in bodies]
    first = [*one, 20, 20, *TAIL, 11, 12]
    second = [*first, 20, 20, 20, *TAIL, 13]
    assert sorted(seen, key=len) == [one, other, first, second]
    assert phase.tokens == 20
    lengths = {len(body["token_ids"]): body["sampling_params"]["max_tokens"] for body in bodies}
    assert lengths == {3: 5, 4: 5, len(first): 6, len(second): 4}
    for body in bodies:
        parameters = body["sampling_params"]
        assert parameters["stop_token_ids"] == []
        assert parameters["ignore_eos"] is True
        assert parameters["logprobs"] == 0


def test_replies_differ_in_length_and_are_the_same_each_time() -> None:
    found = [rollout_stage.reply_length(64, 0.5, f"e{n}", turn) for n in range(300) for turn in range(6)]
    assert (min(found), max(found)) == (32, 96)
    assert sum(found) / len(found) == pytest.approx(64, abs=2)
    assert found[:6] == [rollout_stage.reply_length(64, 0.5, "e0", turn) for turn in range(6)]
    assert len(set(found[:6])) > 2
    assert rollout_stage.reply_length(64, 0.0, "e0", 0) == 64


def test_the_steady_rate_leaves_out_the_edges() -> None:
    ends = [10.0, 4.0, 3.0, 2.0, 1.0, 0.9]
    phase = rollout_stage.Phase(12, 10.0, ends)
    assert phase.rate == 1.2
    assert phase.steady(1) == pytest.approx(8 / (4.0 - 0.9))


def test_plays_of_a_phase_differ_and_last_as_long_as_told() -> None:
    plays = rollout_stage.requests("p", episodes=3, turns=4, words=6, seed=100)
    assert [play.episode for play in plays] == ["p-0", "p-1", "p-2"]
    names: dict[str, Any] = {}
    exec(plays[0].source, names)
    firsts = set()
    for play in plays:
        program = names["RelayEnv"](max_turns=play.max_turns)
        firsts.add(program.reset(play.seed))
        ends = [program.step("7")[2] for _ in range(4)]
        assert ends == [False, False, False, True]
    assert len(firsts) == 3
    assert all(len(first.split()) == 7 for first in firsts)


def test_cpu_of_processes_is_told_for_a_thousand_tokens() -> None:
    processes = rollout.Processes()
    processes.start()
    assert sum(range(2_000_000)) > 0
    processes.stop()
    found = processes.per_thousand(2000)
    assert set(found) == {"engine", "sandbox"}
    assert found["engine"] > 0


@pytest.mark.slow
def test_a_crowd_plays_at_once(tmp_path: Path) -> None:
    work = rollout.Work(crowd=24, delay=0.2, crowd_turns=2)
    model = rollout.rollout_model.build(tmp_path / "model", context=1024)
    crowd = anyio.run(rollout._crowd, work, tmp_path, model)
    assert crowd.together == 24
    assert 0 <= crowd.own_lag_p99_ms <= crowd.loop_lag_p99_ms <= crowd.loop_lag_max_ms
    assert crowd.turns_per_s > 0


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(240)
def test_everything_is_measured() -> None:
    work = rollout.Work(concurrency=8, tokens=16, turns=3, repeat=1, seconds=1.0, crowd=16, delay=0.1)
    figures = anyio.run(rollout.measure, work, lambda text: None, backend_options={"use_uvloop": True})
    told = msgspec.json.decode(msgspec.json.encode(figures))
    for name in ("engine_tok_per_s", "raw_tok_per_s", "ratio", "loop_lag_p99_ms"):
        assert told[name] > 0
    for rate in (figures.single_turn, figures.multi_turn):
        assert 0.2 < rate.ratio < 5.0, "both sides sample the same tokens on one server"
        assert set(rate.engine_cpu) == {"engine", "vllm", "broker", "sandbox"}
        assert rate.engine_cpu["vllm"] > 0
    assert figures.multi_turn.engine_cpu["sandbox"] > 0
    assert figures.ratio == figures.single_turn.ratio
    assert rollout.summary(figures)
