"""Loose gates against regressions by a factor (docs/sandbox.md, case 30)."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import msgspec
import pytest
from sandbox_siege import HOSTS
from scenes.programs import ECHO, PEAK
from scenes.sandboxes import emulated

from engine.bench.sandbox import SandboxOptions, measure
from sandbox import SandboxPool


@pytest.mark.slow
@pytest.mark.parametrize("features", [HOSTS[0], HOSTS[-2]])
async def test_figures_stay_in_their_order_of_magnitude(features: tuple[str, ...]) -> None:
    async with SandboxPool(launcher=emulated(*features)) as pool:
        cpu, steps = [], []
        for seed in range(40):
            instance = await pool.spawn(PEAK, seed=seed)
            await instance.close()
            cpu.append(instance.cpu)
        async with await pool.spawn(ECHO) as instance:
            for _ in range(300):
                began = time.perf_counter()
                await instance.step("x")
                steps.append(time.perf_counter() - began)
        live = await asyncio.gather(*(pool.spawn(PEAK, seed=k) for k in range(200)))
        shares = [_proportional(instance.pid) for instance in live]
        await asyncio.gather(*(instance.close() for instance in live))
    # best quarter, because other work on the machine only ever adds
    assert statistics.quantiles(cpu)[0] < 0.010
    assert statistics.quantiles(steps)[0] < 0.002
    assert statistics.median(shares) < 6 << 20


def _proportional(pid: int) -> int:
    """Bytes of memory that count for ``pid`` when shared pages are divided among their users."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


@pytest.mark.slow
async def test_the_benchmark_measures_all_it_promises() -> None:
    options = SandboxOptions(spawns=12, steps=30, seconds=0.2, live=16)
    found = msgspec.to_builtins(await measure(options))
    assert found["level"] >= 2
    assert found["live"] == 16
    for name in (
        "spawn_p50_ms",
        "spawns_per_s",
        "spawn_cpu_ms",
        "step_p50_ms",
        "steps_per_s",
    ):
        assert found[name] > 0, name
    assert found["spawn_p50_ms"] <= found["spawn_p99_ms"]
    assert found["mb_per_env"] < 20
