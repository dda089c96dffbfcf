"""Deaths on a busy host: the kernel's, the program's and other people's are told apart (case 25)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Iterator

import pytest
from scenes.programs import ECHO, SPIN, attack

from sandbox import SandboxError, SandboxPool, SandboxSettings

pytestmark = pytest.mark.slow

# 101 and 117 are ptrace on x86_64 and aarch64; the x32 table is foreign to both.
FORBIDDEN = attack("return raw((0x40000000 | 39, 117), 0, 0, 0, 0)")


async def death(call: Awaitable[object]) -> str:
    """Return the name of the error that a call ends with."""
    try:
        await call
    except SandboxError as error:
        return type(error).__name__
    return "an answer"


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep the processors busy with ``processes`` that spin."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("deaths", "spinning"),
    [
        pytest.param(60, 8, id="short", marks=pytest.mark.timeout(300)),
        pytest.param(1000, 24, id="long", marks=[pytest.mark.long, pytest.mark.timeout(0)]),
    ],
)
async def test_no_death_is_misread_on_a_busy_host(deaths: int, spinning: int) -> None:
    found, turns = Counter[tuple[str, str]](), asyncio.Semaphore(8)

    async def forbidden() -> None:
        async with turns, await pool.spawn(FORBIDDEN) as instance:
            found["forbidden call", await death(instance.step("go"))] += 1

    async def killed(number: int) -> None:
        spins = number % 2 == 1
        async with turns, await pool.spawn(SPIN if spins else ECHO) as instance:
            call = asyncio.create_task(death(instance.step("go"))) if spins else None
            # at once, in the middle of a call, or while no call is under way
            await asyncio.sleep((0, 0.001, 0.02)[number % 3])
            os.kill(instance.pid, signal.SIGKILL)
            found["killed from outside", await (call or death(instance.step("on")))] += 1

    async with SandboxPool(SandboxSettings(strikes=2)) as pool:
        # two of these that count as strikes would end the test
        with busy(spinning):
            await asyncio.gather(*(killed(number) for number in range(deaths)))
        assert pool.statistics()["quarantined_programs"] == 0
    async with SandboxPool(SandboxSettings(strikes=0)) as pool:
        with busy(spinning):
            await asyncio.gather(*(forbidden() for _ in range(deaths)))
    assert found == {
        ("forbidden call", "EnvViolation"): deaths,
        ("killed from outside", "InstanceClosed"): deaths,
    }
