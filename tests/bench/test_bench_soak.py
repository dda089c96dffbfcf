"""The soak test itself: its arithmetic, one short run, and the long one by option."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import codec
from bus.messages import SampleReady
from engine.bench import soak
from engine.bench.soak_client import Histogram, sample
from engine.errors import SpadeError


def test_a_leak_is_seen_through_noise_and_steps() -> None:
    source = random.Random(1)
    times = [float(second) for second in range(600)]
    noise = [source.gauss(0, 0.5) for _ in times]
    leaking = soak.growth(times, [50 + 2 * t / 60 + n for t, n in zip(times, noise, strict=True)])
    assert leaking.slope == pytest.approx(2.0, abs=0.1)
    assert leaking.slope_low < 2.0 < leaking.slope_high
    spike = [40.0 if 300 <= t < 330 else n for t, n in zip(times, noise, strict=True)]
    assert abs(soak.growth(times, spike).slope) < 0.1
    assert soak.growth(times, spike).highest == 40.0


@given(st.lists(st.floats(0.01, 1e5), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_quantiles_are_right_within_their_class(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    rank = next(i for i in range(len(values)) if i + 1 >= share * len(values))
    exact = sorted(values)[rank]
    assert exact * 0.999 <= histogram.quantile(share) <= exact * 1.021
    assert histogram.total == len(values)
    assert histogram.quantile(1.0) == max(values)


def test_no_values_have_no_quantile() -> None:
    assert Histogram().quantile(0.5) == 0.0


@pytest.mark.parametrize("size", [1000, 36_000, 1_000_000])
def test_samples_have_the_size_asked_for(size: int) -> None:
    frame = codec.encode(sample(7, size), run="soak", role="producer", instance="soak")
    assert size <= len(frame) <= size + 400
    assert isinstance(codec.decode(frame)[1], SampleReady)


def test_the_warm_up_leaves_enough_to_judge() -> None:
    assert soak.warm_up_of(600, None) == 150
    assert soak.warm_up_of(120, None) == 60
    assert soak.warm_up_of(120, 10) == 10
    with pytest.raises(SpadeError, match="too little to judge"):
        soak.warm_up_of(12, None)


@pytest.mark.parametrize(("rate", "size"), [(0.0, 9000), (-1.0, 9000), (math.nan, 9000), (10.0, 0)])
async def test_a_load_that_is_none_is_refused(tmp_path: Path, rate: float, size: int) -> None:
    with pytest.raises(SpadeError, match="are no load") as caught:
        await soak.measure(tmp_path, seconds=60, rate=rate, size=size)
    assert caught.value.remedy


@pytest.mark.slow
async def test_a_short_soak_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_SAMPLE_SECONDS", 0.1)
    result = await soak.measure(tmp_path, seconds=3.0, rate=200, size=4000, warm_up=1.0)
    assert (result.lost, result.gaps, result.server_restarts) == (0, 0, 0)
    assert 100 <= result.rate_reached <= 201
    assert set(result.memory) == {"producer", "consumer", "server"}
    assert all(memory.first > 5 for memory in result.memory.values())
    assert 0 < result.age_p50_ms <= result.age_p99_ms <= result.age_max_ms
    assert "messages of 4000 bytes" in soak.text(result)


@pytest.mark.slow
async def test_a_client_that_dies_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpadeError, match=r"(?s)producer of the soak test ended early.*MemoryError"):
        await soak.measure(tmp_path, seconds=3.0, rate=100, size=1 << 62, warm_up=-9.0)


@pytest.mark.chaos
@pytest.mark.timeout(0)
async def test_memory_does_not_grow(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """``--soak-seconds 600`` is the real thing: 500 messages/s of 36 KB."""
    seconds: float = request.config.getoption("--soak-seconds")
    if not seconds:
        pytest.skip("only with --soak-seconds")
    result = await soak.measure(tmp_path, seconds=seconds, rate=500, size=36_000)
    assert result.within_target, soak.text(result)
