"""Several processes of one learner: the same numbers as one, and no process left when one is gone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
LEARNER = {"optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1}, "kl": 0.1, "step_seconds": 60.0}
BATCHES = [
    {"seed": 1, "rows": 9, "bound": 64, "steps": 1},
    {"seed": 2, "rows": 2, "bound": 1000, "steps": 1},  # one micro-batch: a rank has nothing to do
    {"seed": 3, "rows": 5, "bound": 64, "steps": 2},
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(job: dict[str, Any], place: Path, ranks: int) -> list[str]:
    file = place.with_suffix(".json")
    file.write_text(json.dumps({**job, "out": str(place.with_suffix(".pt"))}))
    work = [str(HERE / "rank_work.py"), str(file)]
    if ranks == 1:
        return [sys.executable, *work]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--monitor-interval", "0.2"]
    return [
        sys.executable, *launcher, "--master-addr", "127.0.0.1", "--master-port", str(free_port()), *work,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    known = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
    paths = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)])
    return {**known, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(job: dict[str, Any], place: Path, ranks: int) -> dict[str, Any]:
    done = subprocess.run(
        command(job, place, ranks),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(place.with_suffix(".pt"), weights_only=True)
    return found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["looks"]) == len(expected["looks"])
    for one, other in zip(found["looks"], expected["looks"], strict=True):
        assert one["weights"].keys() == other["weights"].keys()
        for name, tensor in other["weights"].items():
            torch.testing.assert_close(one["weights"][name], tensor, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            torch.tensor(one["canary"]), torch.tensor(other["canary"]), atol=1e-4, rtol=0
        )
    for one, other in zip(found["metrics"], expected["metrics"], strict=True):
        for name in ("loss", "grad_norm", "ratio_mean", "trained_tokens", "kl", "loss_designer"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name


@pytest.fixture(scope="module")
def alone(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The job, and what one process makes of it."""
    home = tmp_path_factory.mktemp("alone")
    job = {"learner": LEARNER, "policy": str(policy), "home": str(home), "batches": BATCHES}
    found = run({**job, "save": str(home / "checkpoints")}, home / "alone", 1)
    first, last = found["looks"][0]["weights"], found["looks"][-1]["weights"]
    assert max(float((last[name] - first[name]).abs().max()) for name in first) > 1e-3
    return job, found


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_ranks_equal_one(alone: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path):
    job, expected = alone
    found = run(job, tmp_path / "two", 2)
    assert not found["looks"][0]["sharded"]
    compare(found, expected)
    assert found["metrics"][1]["micro_batches"] == 1.0
