"""Loose gates against regressions by a factor (reference spec sandbox, section 7, case 30)."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

from sandbox_programs import ECHO, PEAK

from sandbox import SandboxPool, Validator


async def test_figures_stay_in_their_order_of_magnitude() -> None:
    async with SandboxPool() as pool:
        spawns, steps, checks = [], [], []
        for seed in range(40):
            began = time.perf_counter()
            instance = await pool.spawn(PEAK, reset_seed=seed)
            spawns.append(time.perf_counter() - began)
            await instance.close()
        async with await pool.spawn(ECHO) as instance:
            for _ in range(300):
                began = time.perf_counter()
                await instance.step("x")
                steps.append(time.perf_counter() - began)
        for _ in range(10):
            began = time.perf_counter()
            assert (await Validator(pool).validate(PEAK, max_turns=4)).ok
            checks.append(time.perf_counter() - began)
        live = await asyncio.gather(*(pool.spawn(PEAK, reset_seed=k) for k in range(100)))
        shares = [_proportional(instance.pid) for instance in live]
        await asyncio.gather(*(instance.close() for instance in live))
    # best quarter, because other work on the machine only ever adds
    assert statistics.quantiles(spawns)[0] < 0.025
    assert statistics.quantiles(steps)[0] < 0.002
    assert statistics.quantiles(checks)[0] < 0.25
    assert statistics.median(shares) < 6 << 20


def _proportional(pid: int) -> int:
    """Bytes of memory that count for ``pid`` when shared pages are divided among their users."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
