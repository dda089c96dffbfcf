"""Features of a host, observations of it, and refusals (docs/sandbox.md, case 27)."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from scenes.programs import ECHO, attack
from scenes.sandboxes import emulated

from sandbox import SandboxPool, SandboxSettings, SandboxUnavailable
from sandbox.protection import judge, require

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="taking features away needs root")

FULL = dict.fromkeys(
    (
        "open",
        "listdir",
        "tcp",
        "udp",
        "fork",
        "kill",
        "shared_memory",
        "executable_memory",
        "memfd",
        "memory",
    ),
    "denied:EPERM",
) | {"trace": "killed"}
BARE = dict.fromkeys(("open", "listdir", "tcp", "memory"), "denied:EACCES") | {"fork": "open"}
WALLS = dict.fromkeys(("mount_ns", "empty_root", "net_ns", "pid_ns", "own_uid"), "on")


@pytest.mark.parametrize(
    ("walls", "canary", "bare", "level", "word"),
    [
        ({}, {}, {}, 4, ""),
        ({"own_uid": "failed:EPERM"}, {}, {}, 3, "uid"),
        ({"own_uid": "n/a", "user_ns": "on"}, {}, {}, 4, ""),
        ({"net_ns": "failed:EPERM"}, {}, {}, 3, "net_ns"),
        ({}, {}, {"tcp": "open:ECONNREFUSED"}, 3, "tcp"),
        ({}, {}, {"open": "open"}, 2, "second wall"),
        ({}, {"fork": "open"}, {}, 1, "fork"),
        ({}, {"trace": "open:0"}, {}, 1, "ptrace"),
        ({}, {"shared_memory": "open"}, {}, 1, "shared_memory"),
        ({}, {"open": "open"}, {}, 0, "open"),
        ({}, {"memory": "open"}, {}, 0, "memory"),
    ],
)
def test_level_is_what_the_canaries_proved(
    walls: dict[str, str], canary: dict[str, str], bare: dict[str, str], level: int, word: str
) -> None:
    found, reasons = judge(WALLS | walls, FULL | canary, BARE | bare)
    assert found == level
    assert word in " ".join(reasons)
    assert bool(reasons) == (level < 4)


@pytest.mark.parametrize("missing", FULL)
def test_a_canary_that_did_not_report_proves_nothing(missing: str) -> None:
    canary = {name: value for name, value in FULL.items() if name != missing}
    if missing == "listdir":
        assert judge(WALLS, canary, BARE)[0] == 4
    else:
        assert judge(WALLS, canary, BARE)[0] < 2


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize(
    ("features", "level"),
    [
        (("no-seccomp",), 1),
        (("false-seccomp",), 1),
        (("nobody", "no-userns", "no-landlock", "no-seccomp"), 0),
    ],
    ids=str,
)
async def test_hosts_without_a_filter_are_refused_by_default(features: tuple[str, ...], level: int) -> None:
    with pytest.raises(SandboxUnavailable, match=f"level {level} here") as caught:
        async with SandboxPool(launcher=emulated(*features)):
            pass
    assert "seccomp" in str(caught.value)
    async with SandboxPool(SandboxSettings(allow_unsafe=True), launcher=emulated(*features)) as pool:
        assert pool.report.level == level
        async with await pool.spawn(ECHO) as instance:
            assert (await instance.step("x")).observation == "1 x"


ORPHANS = """
made = 0
for _ in range(3):
    if os.fork() == 0:
        os.fork()
        os._exit(0)
    made += 1
return made
"""


@pytest.mark.slow
@needs_root
async def test_orphans_of_programs_do_not_end_a_zygote_without_a_filter() -> None:
    """Without a filter programs can fork; what their children leave comes to the zygote as pid 1."""
    settings = SandboxSettings(min_level=1, zygotes=1)
    async with SandboxPool(settings, launcher=emulated("nobody", "no-seccomp")) as pool:
        async with await pool.spawn(attack(ORPHANS)) as instance:
            assert (await instance.step("go")).observation == "3"
        for _ in range(3):
            async with await pool.spawn(ECHO) as instance:
                assert (await instance.step("x")).observation == "1 x"
        assert "zygote_restarts" not in pool.statistics()


async def test_report_of_this_host() -> None:
    async with SandboxPool() as pool:
        report = pool.report
    assert report.level >= 2
    assert report.canary["trace"] == "killed"
    assert report.base_vm > 1 << 20
    assert report.max_live >= 1
    assert set(report.walls) >= {"seccomp", "landlock", "pid_ns", "net_ns", "capabilities"}
    require(report, SandboxSettings(min_level=2))
    with pytest.raises(SandboxUnavailable) as caught:
        require(report, SandboxSettings(min_level=5))
    assert caught.value.report is report
    require(report, SandboxSettings(min_level=5, allow_unsafe=True))


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize(("feature", "level"), [("no-userns", 3), ("no-seccomp", 1)])
async def test_a_zygote_that_comes_back_weaker(tmp_path: Path, feature: str, level: int) -> None:
    """The host may change under a pool: what is reported follows, and what is too weak is refused."""
    weaker = " ".join(emulated(feature))
    script = tmp_path / "launcher"
    script.write_text(f'[ -e "{script}.mark" ] && exec {weaker} "$@"\ntouch "{script}.mark"\nexec "$@"\n')
    launcher = ("/usr/bin/env", f"PYTHONPATH={os.getcwd()}", "/bin/sh", str(script))
    async with SandboxPool(SandboxSettings(zygotes=1), launcher=launcher) as pool:
        assert pool.report.level == 4
        async with await pool.spawn(ECHO) as instance:
            os.kill(instance.zygote.pid, signal.SIGKILL)
            await asyncio.wait_for(instance.zygote.lost.wait(), 10)
        if level < pool.settings.min_level:
            with pytest.raises(SandboxUnavailable, match=f"level {level} here"):
                await pool.spawn(ECHO)
        else:
            async with await pool.spawn(ECHO) as instance:
                assert (await instance.step("x")).observation == "1 x"
            assert pool.report.level == level


async def test_no_program_is_given_to_a_zygote_before_its_report_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = SandboxPool(SandboxSettings(zygotes=1))
    seen: list[bool] = []
    monkeypatch.setattr(
        "sandbox.protection.require",
        lambda found, settings: seen.extend(zygote.ready for zygote in pool.zygotes.values()),
    )
    async with pool:
        assert seen == [False]
        assert [zygote.ready for zygote in pool.zygotes.values()] == [True]
