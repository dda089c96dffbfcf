"""The recipe's table and the host's figures."""

from __future__ import annotations

import msgspec
import pytest

from engine.config import Sandbox
from sandbox import SandboxSettings, host


def test_the_recipes_table_is_taken_as_it_is() -> None:
    table = Sandbox(memory_mb=64, preload=())
    settings = SandboxSettings(**msgspec.structs.asdict(table))
    assert settings.memory_mb == 64
    for field in msgspec.structs.fields(Sandbox):
        assert getattr(SandboxSettings(), field.name) == getattr(Sandbox(), field.name)


def test_figures_of_this_host() -> None:
    assert host.cores() >= 1
    assert 0 < host.available_share() <= 1
    assert 1 <= host.max_live() < 1 << 20


@pytest.mark.parametrize("overcommit", ["0", "2"])
def test_live_instances_are_bounded_by_what_is_scarce(
    monkeypatch: pytest.MonkeyPatch, overcommit: str
) -> None:
    texts = {
        "/proc/meminfo": "MemAvailable: 600000 kB\nCommitLimit: 1000000 kB\nCommitted_AS: 0 kB",
        "/proc/sys/vm/overcommit_memory": overcommit,
        "/proc/self/cgroup": "0::/pod\n5:cpu:/x",
        "/sys/fs/cgroup/pod/pids.max": "300",
        "/sys/fs/cgroup/pod/pids.current": "36",
    }
    monkeypatch.setattr(host, "_read", lambda path: texts.get(str(path), ""))
    # 100 by process ids and 97 by memory; 15 where memory has to be committed
    assert host.max_live() == (97 if overcommit == "0" else 15)


def test_vanished_processes_are_not_seen() -> None:
    assert host.resident(1 << 30) == 0
    assert host.sleeping(1 << 30)
    assert host.pid_of(1 << 20) == 0
