"""A run on four hosts of a cluster as `spade launch slurm` starts it; an srun of the tests starts tasks here.

Two processes are one learner; the server and an evaluator have hosts of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scenes.brokers import free_ports
from scenes.network import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 3
SUITES = {"own": f"dir:{ROOT}/docs/examples/programs", "validation": "seeds:validation"}
RECIPE = """
extends = "ROOT/configs/nano.toml"
run = {name = "cluster", steps = STEPS, roles = ["designer", "agent", "scorer"], drain_seconds = 20.0}
bus = {port = PORT, store_gb = 1.0}
server = {max_concurrency = 64}
designer = {concurrency = 8}
agent = {concurrency = 32}
curriculum = {environments = 6, plays_per_round = 4, hinted_plays = 2}
learner = {supervised_mix = 0.0, designer = {scope = "global"}}
evaluator = {every = 1, suites = [SUITES]}
ui = {live = "off"}
launch = {hosts = {server = 1, learner = 2, evaluator = 1}}
"""


def test_a_job_runs_to_its_end(tmp_path: Path) -> None:
    suites = ", ".join(
        f'{{name = "{name}", source = "{source}", episodes = 12}}' for name, source in SUITES.items()
    )
    port, meeting = free_ports(2)
    text = RECIPE
    for mark, value in (("ROOT", ROOT), ("STEPS", STEPS), ("PORT", port), ("SUITES", suites)):
        text = text.replace(mark, str(value))
    (tmp_path / "recipe.toml").write_text(text)
    words = (sys.executable, "-m", "engine.cli", "launch", "slurm", "recipe.toml", "--out", "the job")
    shims = ROOT / "tests" / "scenes" / "slurm_shim"
    known = {
        **os.environ,
        "PATH": f"{shims}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SPADE_CACHE": os.environ.get("SPADE_CACHE") or str(ROOT / ".cache" / "spade"),
        "SLURM_JOB_NODELIST": ",".join(["localhost"] * 4),
        "MASTER_PORT": str(meeting),
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(words, cwd=tmp_path, env=known, check=True, timeout=60)
    with (tmp_path / "job.out").open("w") as out:
        job = subprocess.Popen(["bash", "the job/job.sh"], cwd=tmp_path, env=known, stdout=out, stderr=out)
        try:
            status = job.wait(840)
        finally:
            job.terminate()
            job.wait(60)
    said = (tmp_path / "job.out").read_text()[-6000:]
    assert status == 0, said
    shown = subprocess.run(
        (sys.executable, "-m", "engine.cli", "status", "--json"),
        cwd=tmp_path, env=known, check=True, timeout=60, capture_output=True, text=True,
    )  # fmt: skip
    facts = json.loads(shown.stdout)
    assert (facts["state"], facts["step"] >= STEPS) == ("complete", True), said
    assert facts["agent_samples_trained"] > 0
    assert facts["episodes_failed"].get("infra", 0) == 0
    run = tmp_path / "runs" / "cluster"
    played = {file.stem.rpartition("-")[0] for file in (run / "evaluations").glob("*.jsonl")}
    assert played, said
    assert played <= set(SUITES)
    logs = {file.name.partition("-")[0] for file in (run / "logs").glob("*-*.jsonl")}
    assert logs == {"learner", "server", "evaluator"}
