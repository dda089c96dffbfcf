"""The benchmark measures all that it promises (docs/sandbox.md, case 30)."""

from __future__ import annotations

import msgspec
import pytest

from engine.bench.sandbox import SandboxOptions, measure


@pytest.mark.slow
async def test_the_benchmark_measures_all_it_promises() -> None:
    options = SandboxOptions(spawns=12, steps=30, seconds=0.2, live=16)
    found = msgspec.to_builtins(await measure(options))
    assert found["live"] == 16
    for name in ("spawn_p50_ms", "spawns_per_s", "spawn_cpu_ms", "step_p50_ms", "steps_per_s"):
        assert found[name] > 0, name
    assert found["spawn_p50_ms"] <= found["spawn_p99_ms"]
    assert found["mb_per_env"] < 20
