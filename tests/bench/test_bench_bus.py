"""``spade bench bus`` with short cases: every figure is present and no message is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from engine.bench import bus as bench
from engine.bench.harness import quantile
from engine.errors import SpadeError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    line = [sys.executable, "-m", "engine.cli", "bench", "bus", "--json"]
    line += ["--seconds", "0.1", "--repeat", "1"]
    command = subprocess.run(line, capture_output=True, text=True, check=False, timeout=590)
    assert command.returncode == 0, command.stderr
    found: dict[str, Any] = json.loads(command.stdout)
    return found


@pytest.mark.parametrize("kind", bench.KINDS)
def test_every_figure_of_a_path_is_there_and_nothing_is_lost(result: dict[str, Any], kind: str) -> None:
    found = result["paths"][kind]
    assert (found.get("lost", 0), found.get("duplicates", 0)) == (0, 0)
    for name in ("small_per_s", "large_mb_per_s", "age_p50_ms", "ack_p99_ms"):
        assert found[name]["low"] <= found[name]["median"] <= found[name]["high"]
        assert found[name]["low"] > 0
    assert found["ack_p50_ms"]["median"] <= found["ack_p99_ms"]["median"]


def test_the_result_states_the_machine_and_its_load(result: dict[str, Any]) -> None:
    assert result["machine"]["cores"] >= 1
    assert "msgspec" in result["machine"]["versions"]
    assert result["load"]["seconds"] > 0


@pytest.mark.parametrize("kind", bench.KINDS)
@pytest.mark.parametrize("size", [bench.SMALL, bench.LARGE])
def test_messages_have_the_size_asked_for(kind: str, size: int) -> None:
    assert 0.95 * size <= bench.Supply(kind, size).frame <= 1.02 * size


def test_a_side_that_fails_is_reported_with_its_reason() -> None:
    job = bench.Job("samples", "consume", 1024, 0.1, "nats://127.0.0.1:1", "")
    with pytest.raises(
        SpadeError, match=r"consume side of samples at 1024 bytes ended early: .*127\.0\.0\.1:1"
    ):
        bench.together([job])


def test_quantiles_by_nearest_rank() -> None:
    assert quantile([], 0.5) == 0.0
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([1, 2, 3], 1.0) == 3
