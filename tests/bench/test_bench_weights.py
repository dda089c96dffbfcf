"""The weight benchmark: simulated layers are what they say, and the whole of it runs on a small model."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec
import pytest

pytest.importorskip("torch")

from engine.bench import weights, weights_model

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.slow
def test_simulated_layers_are_moved_by_the_optimiser_a_little(tmp_path: Path) -> None:
    found = weights_model.simulate(tmp_path, layers=1, hidden=8)
    assert found.parameters == pytest.approx(4.02e9, rel=0.01)
    assert found.whole_bytes == pytest.approx(2 * found.parameters, rel=0.01)
    assert 0.002 < found.changed < 0.2
    assert found.changed * 0.9 < found.bytes_ratio < 2 * found.changed + 0.01
    assert min(found.copy_s, found.plain_load_s, found.whole_s, found.delta_s, found.load_s) > 0


def test_gaps_between_tokens() -> None:
    traffic = weights._Traffic.__new__(weights._Traffic)
    traffic.arrivals = [0.0, 0.001, 0.1, 0.101, 0.2, 0.201, 1.2, 1.201, 1.3]
    assert traffic.longest_gap(0.5) == pytest.approx(0.999)
    assert traffic.usual_gap(0.5) == pytest.approx(0.099)
    assert traffic.longest_gap(9.0) == 0.0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_everything_is_measured() -> None:
    work = weights.Work(requests=2, prompt=8, repeat=1, steps=2, layers=0, shape=SHAPE)
    figures = anyio.run(weights.measure, work, lambda text: None)
    assert figures.large is None
    assert figures.parameters > 50_000
    assert figures.canary_error < 1.0
    assert set(figures.stall) == {"recompute", "keep"}
    for stall in figures.stall.values():
        assert stall.stall_ms >= stall.step_ms > 0
    assert figures.bare_load_ms > 0
    assert figures.bus.put_whole_s > 0
    assert len(figures.bytes_ratios) >= 1
    assert msgspec.json.decode(msgspec.json.encode(figures))["whole_bytes"] == figures.whole_bytes
    assert weights.summary(figures)
