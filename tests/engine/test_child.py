"""Guarded children: ended for certain, restarted within a budget, their last words reported."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from engine.errors import SpadeError
from engine.inference.guarded import guarded
from engine.running.child import Budget, keep_running, tail

LOG = structlog.stdlib.get_logger()


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_budget_is_spent_by_crashes_close_together() -> None:
    budget = Budget(crashes=2, seconds=100)
    assert budget.crashed(0) == 1
    assert budget.crashed(10) == 2
    assert budget.crashed(20) is None


def test_old_crashes_are_forgiven() -> None:
    budget = Budget(crashes=1, seconds=100)
    assert [budget.crashed(at) for at in (0, 150, 300)] == [1, 1, 1]


def test_crashes_at_the_same_place_spend_it_however_far_apart() -> None:
    budget = Budget(crashes=3, seconds=100)
    assert [budget.crashed(1000 * at, 19) for at in range(4)] == [1, 1, 1, None]
    assert budget.in_place == 4


def test_who_falls_back_has_to_get_beyond_where_it_was() -> None:
    budget = Budget(crashes=3, seconds=100)
    assert [budget.crashed(1000 * at, point) for at, point in enumerate((19, 16, 18, 19))] == [1, 1, 1, None]


def test_progress_is_forgiven() -> None:
    budget = Budget(crashes=2, seconds=100)
    points = (-1, -1, 0, 0, 1, None, 1)
    assert [budget.crashed(1000 * at, point) for at, point in enumerate(points)] == [1] * len(points)
    assert budget.crashed(9000, 1) is None


async def run(text: str, directory: Path, *, draining: anyio.Event | None = None, **options: Any) -> None:
    """Keep a child running that executes ``text``; its output goes to ``directory``/out."""
    draining = draining or anyio.Event()
    with anyio.fail_after(20):
        log = directory / "out"
        await keep_running("learner", python(text), log=log, logger=LOG, draining=draining, **options)


async def test_a_child_that_fails_at_the_same_round_is_reported_with_it(tmp_path: Path) -> None:
    """Each attempt may take any time: here no crash counts as recent."""

    async def trained() -> int:
        return 7

    text = "print('The gradient of step 9 is not finite'); raise SystemExit(1)"
    with pytest.raises(SpadeError) as caught:
        await run(text, tmp_path, budget=Budget(crashes=1, seconds=0.0), progress=trained)
    assert "status 1, 2 times in a row after round 7, and is not started again" in str(caught.value)
    assert "The gradient of step 9 is not finite" in str(caught.value)


async def test_the_end_of_the_context_is_the_end_of_the_child(tmp_path: Path) -> None:
    log = tmp_path / "child.out"
    command = python("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    async with guarded(command, log=log, piped=True) as process:
        pid = int(await process.stdout.receive())
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert process.returncode is not None


async def test_a_crashed_child_is_started_again(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"import os, sys; p = {str(mark)!r}; n = os.path.exists(p); open(p, 'w'); sys.exit(0 if n else 7)"
    await run(text, tmp_path)
    assert mark.exists()


async def test_a_child_that_keeps_crashing_is_reported_with_its_last_words(tmp_path: Path) -> None:
    text = "import os, signal; print('no memory left', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(SpadeError) as caught:
        await run(text, tmp_path, budget=Budget(crashes=0))
    assert "learner was ended by signal 9" in str(caught.value)
    assert "no memory left" in str(caught.value)
    assert caught.value.exit_code == 1


async def test_bad_input_is_not_tried_twice(tmp_path: Path) -> None:
    with pytest.raises(SpadeError) as caught:
        await run("print('once'); raise SystemExit(2)", tmp_path)
    assert caught.value.exit_code == 2
    assert tail(tmp_path / "out") == "  once"


async def test_a_child_that_ends_while_draining_is_not_started_again(tmp_path: Path) -> None:
    draining = anyio.Event()
    draining.set()
    await run("raise SystemExit(5)", tmp_path, draining=draining)


async def test_the_child_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    owner = (
        "import anyio, sys\nfrom pathlib import Path\nfrom engine.inference.guarded import guarded\n"
        "async def main():\n"
        "    text = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "    command = [sys.executable, '-c', text]\n"
        "    async with guarded(command, log=Path(sys.argv[1]), piped=True, grace=0.2) as process:\n"
        "        print((await process.stdout.receive()).decode(), end='', flush=True)\n"
        "        await anyio.sleep_forever()\n"
        "anyio.run(main)\n"
    )
    command = [*python(owner), str(tmp_path / "out")]
    async with await anyio.open_process(command) as process:
        pid = int(await process.stdout.receive())
        ended = os.pidfd_open(pid)
        process.send_signal(signal.SIGKILL)
        with anyio.fail_after(10):
            await anyio.wait_readable(ended)
        os.close(ended)
