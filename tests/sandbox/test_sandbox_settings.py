"""The recipe's table and the host's figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import host

ROOT = Path(__file__).parent.parent.parent


def test_figures_of_this_host() -> None:
    assert host.cores() >= 1
    assert host.memory_shortage(0.0) < 0 < host.memory_shortage(1.1)
    assert host.memory_available() > 1 << 20
    bounds = host.bounds()
    assert {"memory", "processes"} <= bounds.keys()
    assert all(0 < bound < 1 << 30 for bound in bounds.values())
    assert host.oom_kills() >= 0


def pretend(monkeypatch: pytest.MonkeyPatch, texts: dict[str, str]) -> None:
    monkeypatch.setattr(host, "_read", lambda path: texts.get(str(path), ""))


def test_live_instances_are_bounded_by_what_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/meminfo": "MemTotal: 900000 kB\nMemAvailable: 600000 kB",
        "/proc/self/cgroup": "5:cpu:/x\n0::/pod",
        "/sys/fs/cgroup/pod/pids.max": "300",
        "/sys/fs/cgroup/pod/pids.current": "36",
    }
    pretend(monkeypatch, texts)
    found = host.bounds()
    found.pop("open files", None)
    assert found == {"memory": 73, "processes": 100}


@pytest.mark.parametrize("place", ["/pod/run", ""])
def test_a_containers_memory_counts(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The limit is on a group above, or on the one that is mounted at the top of a container."""
    limited = "/sys/fs/cgroup/pod" if place else "/sys/fs/cgroup"
    pretend(
        monkeypatch,
        {
            "/proc/meminfo": "MemAvailable: 9000000 kB\nMemTotal: 10000000 kB",
            "/proc/self/cgroup": f"5:cpu:/x\n0::{place or '/docker/abc'}",
            # 700 MB are used, of which 300 are page cache
            f"{limited}/memory.max": "1048576000",
            f"{limited}/memory.current": "734003200",
            f"{limited}/memory.stat": "anon 1\nfile 419430400\nshmem 104857600",
            "/sys/fs/cgroup/pod/run/memory.max": "max",
            "/sys/fs/cgroup/pod/run/memory.current": "734003200",
        },
    )
    # 600 of 1000 MB are free
    assert host.bounds()["memory"] == 75
    assert host.memory_available() == 629145600
    assert [host.memory_shortage(share) / 1024000 for share in (0.1, 0.6, 0.8)] == pytest.approx(
        [-512, 0, 205], abs=1
    )


@pytest.mark.parametrize(("page", "live"), [(4096, 73), (16384, 18), (65536, 12)])
def test_larger_pages_make_larger_instances(monkeypatch: pytest.MonkeyPatch, page: int, live: int) -> None:
    pretend(monkeypatch, {"/proc/meminfo": "MemTotal: 900000 kB\nMemAvailable: 600000 kB"})
    monkeypatch.setattr(host.resource, "getpagesize", lambda: page)
    assert host.bounds()["memory"] == live


def test_an_unknown_host_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {})
    assert host.memory_available() == 1 << 40
    assert host.memory_shortage(0.9) < 0


def test_open_files_are_not_the_bound_where_the_hard_limit_is_higher() -> None:
    script = (
        "import resource as r\nfrom sandbox import host\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (300, r.getrlimit(r.RLIMIT_NOFILE)[1]))\n"
        "a = host.bounds()['open files']; host.raise_file_limit()\n"
        "print(a, host.bounds().get('open files', 1 << 30))"
    )
    got = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    before, after = map(int, got.stdout.split())
    assert before == 22
    assert after > before


def test_vanished_processes_are_not_seen() -> None:
    assert host.resident(1 << 30) == 0
    assert host.sleeping(1 << 30)
    assert host.pid_of(1 << 20) == 0
    assert not host.exiting(-1, 0)
