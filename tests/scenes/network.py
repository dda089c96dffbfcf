"""Hosts of the tests: network namespaces with a name, a network and a view of the disk of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "10.77.0"


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
        return {**os.environ, **own, "PYTHONPATH": str(ROOT), **more}

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
def network(directory: Path, count: int = 3) -> Iterator[list[Host]]:
    """Hosts at one switch, a bridge in a namespace of its own; skips where that is not allowed."""
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
        for name in (f"{stem}-switch", *(f"{stem}-host{number}" for number in range(1, count + 1))):
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
