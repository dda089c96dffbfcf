"""The rollout benchmark: both sides do the same work, and the whole of it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import msgspec
import pytest
from aiohttp import web
from scenes.endpoint_fake import serving

from bus.messages import Span
from engine.bench import rollout, rollout_sides
from engine.config import SamplingConfig
from engine.errors import SpadeError
from engine.inference.completion import Completion

TAIL = (7, 8, 9)


@asynccontextmanager
async def server() -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Answer every prompt with as many tokens as it asks for; yield the URL and the requests."""
    bodies: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        bodies.append(msgspec.json.decode(await request.read()))
        tokens = [20] * bodies[-1]["sampling_params"]["max_tokens"]
        return web.json_response({"choices": [{"token_ids": tokens}]})

    application = web.Application()
    application.add_routes([web.post("/inference/v1/generate", generate)])
    async with serving(application) as url:
        yield url, bodies


class Pool:
    """Samples as many tokens as asked for, less ``missing``."""

    def __init__(self, missing: int = 0) -> None:
        self.missing, self.stops = missing, [-1]

    async def generate(
        self, prompt: Sequence[int], *, sampling: SamplingConfig, stop_token_ids: Sequence[int], **_: Any
    ) -> Completion:
        self.stops = list(stop_token_ids)
        count = sampling.max_tokens - self.missing
        return Completion([5] * count, [-1.0] * count, (Span(0, 0, count),), "length")


async def test_the_pool_acts_with_the_length_that_was_asked_for() -> None:
    inner = Pool()
    pool = rollout_sides.FixedLengthPool(inner, TAIL)  # type: ignore[arg-type]
    asked = {"sampling": SamplingConfig(max_tokens=10), "key": "e", "stop_token_ids": (2,)}
    reply = await pool.generate([1, 2], **asked)  # type: ignore[arg-type]
    assert reply.tokens == [5] * 7 + list(TAIL)
    assert reply.finish == "stop"
    assert inner.stops == [], "no stop token shortens a reply"
    assert pool.asked == {"e": [([1, 2], 10)]}
    inner.missing = 1
    with pytest.raises(SpadeError, match="sampled 9 of 10"):
        await pool.generate([1, 2], **asked)  # type: ignore[arg-type]


async def test_the_bare_client_repeats_the_requests_at_the_same_lengths() -> None:
    one, other = [1, 2, 3], [4, 5, 6, 7]
    prompts = [one, [*one, 30, 30, *TAIL, 11, 12], [*one, *([0] * 13), 13]]
    scripts = [list(map(rollout_sides.RequestShape, prompts, [5, 6, 4]))]
    scripts.append([rollout_sides.RequestShape(other, 5)])
    async with server() as (url, bodies), aiohttp.ClientSession() as session:
        phase = await rollout_sides.BareClient(url, session, TAIL).phase(scripts, concurrency=2)
    assert (phase.turns, phase.tokens, len(phase.ends)) == (4, 20, 2)
    first = [*one, 20, 20, *TAIL, 11, 12]
    second = [*first, 20, 20, 20, *TAIL, 13]
    assert sorted((body["token_ids"] for body in bodies), key=len) == [one, other, first, second]
    lengths = {len(body["token_ids"]): body["sampling_params"]["max_tokens"] for body in bodies}
    assert lengths == {3: 5, 4: 5, len(first): 6, len(second): 4}


def test_replies_differ_in_length_and_are_the_same_each_time() -> None:
    found = [rollout_sides.reply_length(64, 0.5, f"e{n}", turn) for n in range(300) for turn in range(6)]
    assert (min(found), max(found)) == (32, 96)
    assert sum(found) / len(found) == pytest.approx(64, abs=2)
    assert found[:6] == [rollout_sides.reply_length(64, 0.5, "e0", turn) for turn in range(6)]
    assert rollout_sides.reply_length(64, 0.0, "e0", 0) == 64


def test_the_steady_rate_leaves_out_the_edges() -> None:
    phase = rollout_sides.Phase(12, 10.0, [10.0, 4.0, 3.0, 2.0, 1.0, 0.9])
    assert phase.rate == 1.2
    assert phase.steady(1) == pytest.approx(8 / (4.0 - 0.9))


def test_episodes_of_a_phase_differ_and_have_the_turns_asked_for() -> None:
    names: dict[str, Any] = {}
    firsts = set()
    for request in rollout_sides.requests("p", episodes=3, turns=4, words=6, seed=100):
        exec(request.source, names)
        program = names["RelayEnv"](max_turns=request.max_turns)
        firsts.add(program.reset(request.seed))
        assert [program.step("7")[2] for _ in range(4)] == [False, False, False, True]
    assert len(firsts) == 3
    assert all(len(first.split()) == 7 for first in firsts)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(300)
def test_everything_is_measured() -> None:
    options = rollout.RolloutOptions(concurrency=8, tokens=16, turns=3, repeat=1, seconds=1.0)
    figures = anyio.run(rollout.measure, options, backend_options={"use_uvloop": True})
    for rate in (figures.single_turn, figures.multi_turn):
        assert 0.2 < rate.ratio.median < 5.0, "both sides sample the same tokens on one server"
        assert rate.engine_tok_per_s.low > 0
    assert figures.load.seconds > 0
