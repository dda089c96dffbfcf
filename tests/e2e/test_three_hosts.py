"""A run on three hosts, which are three network namespaces with disks of their own; weights by the bus.

Host 1 has the broker, the scorer and the learner, host 2 a vLLM server, host 3 the agent and the designer.
They are started with the commands of docs/operating.md and docs/bus-security.md, each with its role's key.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from scenes.brokers import SERVER, configuration

from bus.server import locate

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
RUN = "three"
PREFIX = "10.77.0"
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


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)


@dataclass
class Host:
    """A namespace. ``hidden`` is what this host does not see of the others' disk."""

    namespace: str
    address: str
    home: Path
    hidden: tuple[Path, ...] = ()

    def command(self, *words: str) -> list[str]:
        """``words`` on this host: its network, its name, its view of the disk."""
        covers = "".join(f"mount -t tmpfs none '{path}' && " for path in self.hidden)
        shell = f"hostname '{self.namespace}' && {covers}exec \"$@\""
        inside = ("unshare", "--uts", "--mount", "--", "sh", "-c", shell, "sh", *words)
        return ["ip", "netns", "exec", self.namespace, *inside]

    def environment(self, **more: str) -> dict[str, str]:
        """The model's cache is shared: every host would build the same one."""
        cache = os.environ.get("SPADE_CACHE") or str(ROOT / ".cache" / "spade")
        own = {"XDG_CACHE_HOME": str(self.home / "cache"), "SPADE_CACHE": cache, "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own, **more, "PYTHONPATH": str(ROOT)}

    def run(self, *words: str) -> str:
        done = subprocess.run(
            self.command(*words), env=self.environment(), cwd=self.home, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextmanager
    def start(self, name: str, *words: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process whose words go to ``name``.out; it is killed if it is still there at the end."""
        with (self.home / f"{name}.out").open("wb") as out:
            process = subprocess.Popen(
                self.command(*words), env=self.environment(**more), cwd=self.home, stdout=out, stderr=out
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait(20)


@contextmanager
def network(directory: Path) -> Iterator[list[Host]]:
    """Three hosts at one switch, a bridge in a namespace of its own; skips where that is not allowed."""
    made: list[str] = []
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for program in ("ip", "unshare", "mount"):
        if shutil.which(program) is None:
            pytest.skip(f"network namespaces need the program {program}")

    def must(*words: str) -> None:
        done = ip(*words)
        if done.returncode:
            pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")

    try:
        stem = f"spade{os.getpid()}"
        for name in (f"{stem}-switch", *(f"{stem}-host{number}" for number in (1, 2, 3))):
            must("netns", "add", name)
            made.append(name)
            must("-n", name, "link", "set", "lo", "up")
        must("-n", made[0], "link", "add", "br0", "type", "bridge")
        must("-n", made[0], "link", "set", "br0", "up")
        hosts = []
        for number, name in enumerate(made[1:], 1):
            port = f"p{number}"
            must("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", made[0])
            must("-n", made[0], "link", "set", port, "master", "br0")
            must("-n", made[0], "link", "set", port, "up")
            must("-n", name, "addr", "add", f"{PREFIX}.{number}/24", "dev", "eth0")
            must("-n", name, "link", "set", "eth0", "up")
            home = directory / f"host{number}"
            home.mkdir()
            hosts.append(Host(name, f"{PREFIX}.{number}", home))
        for host in hosts:
            host.hidden = tuple(other.home for other in hosts if other is not host)
            must(*host.command("true")[1:])
        yield hosts
    finally:
        for name in made:
            end(name)


def end(namespace: str) -> None:
    """End what runs in a namespace, and the namespace."""
    for pid in ip("netns", "pids", namespace).stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    ip("netns", "del", namespace)


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


def test_ten_steps_on_three_hosts(tmp_path: Path) -> None:
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
