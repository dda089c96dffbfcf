"""The weight benchmark: gaps between tokens, and a whole measurement on a small model."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from engine.bench import weights

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_gaps_between_tokens() -> None:
    arrivals = [0.0, 0.001, 0.1, 0.101, 0.2, 0.201, 1.2, 1.201, 1.3]
    assert weights.longest_gap(arrivals, 0.5) == pytest.approx(0.999)
    assert weights.usual_gap(arrivals, 0.5) == pytest.approx(0.099)
    assert weights.longest_gap(arrivals, 9.0) == 0.0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_everything_is_measured() -> None:
    options = weights.WeightOptions(requests=2, prompt=8, repeat=1, shape=SHAPE)
    figures = anyio.run(weights.measure, options)
    assert figures.parameters > 50_000
    assert 0 < figures.canary_error < 1.0
    assert set(figures.standstill) == {"recompute", "keep"}
    for found in figures.standstill.values():
        assert min(found.update_ms, found.pause_ms, found.step_ms) > 0
    assert figures.bare_load_ms > 0
    assert figures.arrival["bus"].upload_s > 0
    assert msgspec.json.decode(msgspec.json.encode(figures))["bytes"] == figures.bytes
