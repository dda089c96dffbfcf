"""The other ways of running a generated program: a process each, this interpreter, a pool of threads.

Only programs of our own are run here: two of the three confine nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

_DEADLINE = 0.25
_THREADS = 128
_STEPS = 200
_TRUSTED = """class EchoEnv:
    def reset(self, seed):
        return "say something"
    def step(self, action):
        return action, 0.5, False, False, {}
"""
_SPIN = _TRUSTED.replace("return action, 0.5, False, False, {}", "while True: pass")
_WORKER = """
import json, sys
if sys.argv[1]:
    __import__(sys.argv[1])
for line in sys.stdin:
    request = json.loads(line)
    if "source" in request:
        names = {"__name__": "environment"}
        exec("import random\\n" + request["source"], names)
        env = [v for k, v in names.items() if k.endswith("Env")][-1]()
        answer = env.reset(request["seed"])
    else:
        answer = env.step(request["action"])
    print(json.dumps(answer), flush=True)
"""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one other way, as in the sandbox's. None where it has no such thing, or cannot do it."""

    spawn_p50_ms: float
    spawn_p99_ms: float
    spawns_per_s: float
    step_p50_ms: float
    steps_per_s: float
    pss_mb_per_env: float | None = None
    kill_after_deadline_ms: float | None = None
    confined: bool = False
    note: str = ""


async def measure_peers(programs: Sequence[str], *, spawns: int) -> dict[str, Peer]:
    """Measure all of them, one after another."""
    return {
        "subprocess": await _subprocess(programs, spawns, ""),
        "subprocess_numpy": await _subprocess(programs, spawns, "numpy"),
        "in_process": _in_process(programs, 10 * spawns),
        "thread_pool": await _thread_pool(programs, 10 * spawns),
    }


def _figures(spawn: Sequence[float], rate: float, steps: Sequence[float], **more: Any) -> Peer:
    ordered, middle = sorted(spawn), sorted(steps)[len(steps) // 2]
    return Peer(
        spawn_p50_ms=round(1e3 * ordered[len(ordered) // 2], 4),
        spawn_p99_ms=round(1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 4),
        spawns_per_s=round(rate, 1),
        step_p50_ms=round(1e3 * middle, 4),
        steps_per_s=round(len(steps) / sum(steps), 1),
        **more,
    )


class _Process:
    """A program in an interpreter of its own, which nothing confines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, source: str, seed: int, package: str) -> _Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-s", "-P", "-B", "-c", _WORKER, package),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )
        self = cls(process)
        await self.ask({"source": source, "seed": seed})
        return self

    async def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        return json.loads(await self.process.stdout.readline())

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def _subprocess(programs: Sequence[str], count: int, package: str) -> Peer:
    from engine.bench.sandbox import proportional

    spawn = []
    for number, source in zip(range(count), itertools.cycle(programs), strict=False):
        began = time.perf_counter()
        worker = await _Process.start(source, number, package)
        spawn.append(time.perf_counter() - began)
        await worker.close()
    began = time.perf_counter()

    async def one(number: int) -> None:
        await (await _Process.start(programs[number % len(programs)], number, package)).close()

    for first in range(0, count, 4):
        await asyncio.gather(*(one(number) for number in range(first, min(first + 4, count))))
    rate = count / (time.perf_counter() - began)
    crowd = [await _Process.start(_TRUSTED, number, package) for number in range(min(12, count))]
    steps = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        await crowd[0].ask({"action": "7"})
        steps.append(time.perf_counter() - began)
    shares = [share for worker in crowd if (share := proportional(worker.process.pid))]
    for worker in crowd:
        await worker.close()
    worker = await _Process.start(_SPIN, 0, package)
    began = time.perf_counter()
    try:
        await asyncio.wait_for(worker.ask({"action": "7"}), _DEADLINE)
    except TimeoutError:
        await worker.close()
    late = time.perf_counter() - began - _DEADLINE
    pss = round(sum(shares) / len(shares) / (1 << 20), 2) if shares else None
    return _figures(
        spawn, rate, steps, pss_mb_per_env=pss, kill_after_deadline_ms=round(1e3 * late, 3), note=package
    )


def _begin(source: str, seed: int) -> Any:
    names: dict[str, Any] = {"__name__": "environment"}
    exec("import random\n" + source, names)
    env = [value for name, value in names.items() if name.endswith("Env")][-1]()
    env.reset(seed)
    return env


def _in_process(programs: Sequence[str], count: int) -> Peer:
    """Run programs here, as a trainer does that executes them itself."""
    spawn, steps = [], []
    for number, source in zip(range(count), itertools.cycle(programs), strict=False):
        began = time.perf_counter()
        _begin(source, number)
        spawn.append(time.perf_counter() - began)
    env = _begin(_TRUSTED, 0)
    for _ in range(_STEPS):
        began = time.perf_counter()
        env.step("7")
        steps.append(time.perf_counter() - began)
    note = "trusted sample only; nothing is confined and a hung program hangs the trainer"
    return _figures(spawn, count / sum(spawn), steps, note=note)


async def _thread_pool(programs: Sequence[str], count: int) -> Peer:
    """Run programs in threads under a deadline; a thread that hangs cannot be ended."""
    loop = asyncio.get_running_loop()
    spawn, steps = [], []
    with ThreadPoolExecutor(_THREADS) as pool:

        async def begin(number: int) -> Any:
            source = programs[number % len(programs)]
            return await asyncio.wait_for(loop.run_in_executor(pool, _begin, source, number), 30)

        for number in range(count):
            began = time.perf_counter()
            await begin(number)
            spawn.append(time.perf_counter() - began)
        began = time.perf_counter()
        for first in range(0, count, 8):
            await asyncio.gather(*(begin(number) for number in range(first, min(first + 8, count))))
        rate = count / (time.perf_counter() - began)
        env = _begin(_TRUSTED, 0)
        for _ in range(_STEPS):
            began = time.perf_counter()
            await asyncio.wait_for(loop.run_in_executor(pool, env.step, "7"), 30)
            steps.append(time.perf_counter() - began)
    note = "trusted sample only; nothing is confined and a hung thread cannot be killed"
    return _figures(spawn, rate, steps, note=note)
