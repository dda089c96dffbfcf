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
from sandbox.frames import ZygoteReady
from sandbox.protection import report, require

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="taking features away needs root")

BY_FILTER = ["open", "tcp", "udp", "fork", "kill", "shared_memory", "executable_memory", "memfd", "memory"]
FULL = dict.fromkeys([*BY_FILTER, "listdir"], "denied:EPERM") | {"trace": "killed"}
BARE = dict.fromkeys(("open", "listdir", "tcp", "memory"), "denied:EACCES") | {"fork": "open"}
WALLS = dict.fromkeys(("mount_ns", "empty_root", "net_ns", "pid_ns", "own_uid"), "on")


@pytest.mark.parametrize(
    ("walls", "canary", "bare", "holes", "missing"),
    [
        ({}, {}, {}, "", ""),
        ({"own_uid": "n/a", "user_ns": "on"}, {}, {}, "", ""),
        ({"own_uid": "failed:EPERM"}, {}, {}, "", "no uid"),
        ({"net_ns": "failed:EPERM"}, {}, {}, "", "net_ns: failed:EPERM"),
        ({}, {}, {"tcp": "open:ECONNREFUSED"}, "", "second wall: tcp open:ECONNREFUSED"),
        ({}, {}, {"open": "open"}, "", "second wall: open open"),
        ({}, {"trace": "open:0"}, {}, "ptrace open:0", ""),
        *(({}, {name: "open"}, {}, f"{name} open", "") for name in BY_FILTER),
        *(({}, {name: ""}, {}, name, "") for name in (*BY_FILTER, "trace")),
    ],
)
def test_the_canaries_prove_the_walls(
    walls: dict[str, str], canary: dict[str, str], bare: dict[str, str], holes: str, missing: str
) -> None:
    """A canary that did not report proves nothing."""
    observed = {name: value for name, value in (FULL | canary).items() if value}
    found = report(ZygoteReady(WALLS | walls, "own", "Linux", observed, BARE | bare))
    assert holes in " ".join(found.holes)
    assert missing in " ".join(found.missing)
    assert (bool(found.holes), bool(found.missing)) == (bool(holes), bool(missing))
    require(found, allow_unsafe=True)
    if holes:
        with pytest.raises(SandboxUnavailable, match="cannot be confined here") as caught:
            require(found, allow_unsafe=False)
        assert caught.value.report is found


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize(
    "features",
    [("no-seccomp",), ("false-seccomp",), ("nobody", "no-userns", "no-landlock", "no-seccomp")],
    ids=str,
)
async def test_hosts_without_a_filter_are_refused_by_default(features: tuple[str, ...]) -> None:
    with pytest.raises(SandboxUnavailable, match=r"cannot be confined here.*seccomp"):
        async with SandboxPool(launcher=emulated(*features)):
            pass
    async with SandboxPool(SandboxSettings(allow_unsafe=True), launcher=emulated(*features)) as pool:
        assert "memfd open" in pool.report.holes
        assert ("open open" in pool.report.holes) == (len(features) > 1)
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
    settings = SandboxSettings(allow_unsafe=True, zygotes=1)
    async with SandboxPool(settings, launcher=emulated("nobody", "no-seccomp")) as pool:
        async with await pool.spawn(attack(ORPHANS)) as instance:
            assert (await instance.step("go")).observation == "3"
        for _ in range(3):
            async with await pool.spawn(ECHO) as instance:
                assert (await instance.step("x")).observation == "1 x"
        assert "zygote_restarts" not in pool.statistics()


async def test_report_of_this_host() -> None:
    async with SandboxPool() as pool:
        assert pool.report.holes == ()
        assert pool.report.canary["trace"] == "killed"
        assert set(pool.report.walls) >= {"seccomp", "landlock", "pid_ns", "net_ns", "capabilities"}
        assert 1 <= pool.max_live == min(pool.bounds.values())


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("feature", ["no-userns", "no-seccomp"])
async def test_a_zygote_that_comes_back_weaker(tmp_path: Path, feature: str) -> None:
    """The host may change under a pool: what is reported follows, and what is too weak is refused."""
    weaker = " ".join(emulated(feature))
    script = tmp_path / "launcher"
    script.write_text(f'[ -e "{script}.mark" ] && exec {weaker} "$@"\ntouch "{script}.mark"\nexec "$@"\n')
    launcher = ("/usr/bin/env", f"PYTHONPATH={os.getcwd()}", "/bin/sh", str(script))
    async with SandboxPool(SandboxSettings(zygotes=1), launcher=launcher) as pool:
        assert pool.report.missing == ()
        async with await pool.spawn(ECHO) as instance:
            os.kill(instance.zygote.pid, signal.SIGKILL)
            await asyncio.wait_for(instance.zygote.lost.wait(), 10)
        if feature == "no-seccomp":
            with pytest.raises(SandboxUnavailable, match="cannot be confined here"):
                await pool.spawn(ECHO)
        else:
            async with await pool.spawn(ECHO) as instance:
                assert (await instance.step("x")).observation == "1 x"
            assert any(wall.startswith("net_ns") for wall in pool.report.missing)


async def test_no_program_is_given_to_a_zygote_before_its_report_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = SandboxPool(SandboxSettings(zygotes=1))
    seen: list[bool] = []
    monkeypatch.setattr(
        "sandbox.protection.require",
        lambda found, **_: seen.extend(zygote.ready for zygote in pool.zygotes.values()),
    )
    async with pool:
        assert seen == [False]
        assert [zygote.ready for zygote in pool.zygotes.values()] == [True]
