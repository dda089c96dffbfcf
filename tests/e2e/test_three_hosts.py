"""A run on three hosts, which are three network namespaces with disks of their own; weights by the bus.

Host 1 has the broker, the scorer and the learner, host 2 a vLLM server, host 3 the agent and the designer.
They are started with the commands of docs/operating.md and docs/bus-security.md, each with its role's key.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from scenes.brokers import SERVER, configuration
from scenes.network import PREFIX, ROOT, Host, network

from bus.server import locate

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 6
RUN = "three"
PORT = 4222
SPADE = (sys.executable, "-m", "engine.cli")
RECIPE = f"""
extends = "{ROOT}/configs/nano.toml"

run = {{name = "{RUN}", steps = {STEPS}, roles = ["scorer", "learner"], drain_seconds = 20.0}}
bus = {{url = "nats://{PREFIX}.1:{PORT}", credentials = "broker/seeds", store_gb = 1.0}}
server = {{weights = "bus", max_concurrency = 64, args = {{host = "0.0.0.0", max-model-len = 1024}}}}
designer = {{concurrency = 8}}
agent = {{concurrency = 32}}
curriculum = {{environments = 6, plays_per_round = 4, hinted_plays = 2}}
learner = {{supervised_mix = 0.0, designer = {{scope = "global"}}}}
evaluator = {{suites = []}}
ui = {{live = "off"}}
"""


def status(host: Host) -> dict[str, Any]:
    words = (*SPADE, "status", RUN, "--json")
    done = subprocess.run(
        words, env=host.environment(), cwd=host.home, capture_output=True, timeout=60, check=False
    )
    return json.loads(done.stdout) if done.returncode == 0 else {}


def words_of(hosts: list[Host]) -> str:
    return "\n".join(
        f"{path}:\n{path.read_text()[-1500:]}" for host in hosts for path in sorted(host.home.glob("*.out"))
    )


def key(hosts: list[Host], role: str, target: Host) -> str:
    """Bring the key of a role, and no other, to its host."""
    seed = hosts[0].home / "broker" / "seeds" / f"{role}.seed"
    path = target.home / f"{role}.seed"
    path.touch(mode=0o600)
    path.write_bytes(seed.read_bytes())
    return str(path)


def test_six_steps_on_three_hosts(tmp_path: Path) -> None:
    with ExitStack() as stack:
        hosts = stack.enter_context(network(tmp_path))
        one, two, three = hosts
        (one.home / "recipe.toml").write_text(RECIPE)
        one.run(*SPADE, "bus", "provision", "--run", RUN, "-D", "broker")
        (one.home / "broker" / SERVER).write_text(configuration(PORT, one.address))
        stack.enter_context(one.start("broker", str(locate()), "-c", f"broker/{SERVER}"))
        url = f"nats://{one.address}:{PORT}"
        run = stack.enter_context(one.start("run", *SPADE, "run", "recipe.toml"))
        began = monotonic()
        while not (one.home / "runs" / RUN / "bus.json").exists():
            assert run.poll() is None, words_of(hosts)
            assert monotonic() - began < 400, words_of(hosts)
            sleep(0.2)
        others = [
            stack.enter_context(
                host.start(
                    role,
                    *(*SPADE, "role", role, "--run", RUN, "--connect", url),
                    *("--credentials", key(hosts, role, host)),
                )
            )
            for role, host in (("server", two), ("agent", three), ("designer", three))
        ]
        try:
            assert run.wait(400) == 0, words_of(hosts)
        except subprocess.TimeoutExpired:
            pytest.fail(words_of(hosts))
        # The end of the run drains the roles on the other hosts.
        assert [process.wait(60) for process in others] == [0, 0, 0], words_of(hosts)
        facts = status(one)
        assert facts["state"] == "complete", facts
        assert facts["step"] >= STEPS
        # the last batch flushes the windows: the run may be over before its weights are there
        assert facts["versions_serving"] in ([facts["version_published"] - 1], [facts["version_published"]])
        assert facts["agent_samples_trained"] > 0
        assert facts["episodes_failed"].get("infra", 0) == 0, facts
        # The weights came over the wire: their files lie on the server's own disk.
        assert list((two.home / "cache").rglob("weights-cache/*/*.safetensors"))
        assert not list(three.home.rglob("*.safetensors"))
