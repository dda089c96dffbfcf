"""A run whose stream of facts lost its tail: refused with the way out, and salvaged into a new run.

The learner is the run's own, its samples come from here: no server is needed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import torch
from learner_fakes import make_policy, random_samples, round_of
from nano_runs import START_SECONDS, ended, nothing_left, output, start

from bus import Bus, connect
from bus.messages import BatchTrained, PolicyPublished
from engine.records.archive import ProgramArchive
from engine.running.supervisor import read_address
from engine.training.checkpoint import Checkpoint, newest, read_tensors
from roles.designer import memory_store
from roles.designer.memory import MemoryRecord, MemoryState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SETTINGS = (
    'run.roles=["learner"]',
    "learner.supervised_mix=0",
    "learner.checkpoint_every=1",
    "evaluator.suites=[]",
    "ui.report=false",
)


@asynccontextmanager
async def running(directory: Path, name: str, *settings: str) -> AsyncIterator[Bus]:
    """A run and a client of its bus; at the end of the context the run is stopped by a signal."""
    run = start(directory, *SETTINGS, *settings, f"run.name={name}")
    try:
        with anyio.fail_after(START_SECONDS):
            while (address := read_address(directory / name)) is None:
                assert run.poll() is None, output(directory)
                await anyio.sleep(0.2)
            async with connect(
                address.url, run=name, role="scorer", instance="test", token=address.token
            ) as bus:
                yield bus
        os.kill(run.pid, signal.SIGINT)
        assert await ended(run) == 0, output(directory)
    finally:
        kill(run)
    await nothing_left(directory)


def kill(run: subprocess.Popen[bytes]) -> None:
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()


async def train(bus: Bus, *rounds: int) -> None:
    """Let the learner train ``rounds``, and wait until their batches are announced."""
    left = set(rounds)
    async with bus.follow("EVENT") as records:
        async for record in records:
            if isinstance(record.message, PolicyPublished) and record.message.step == 0:
                for one in rounds:
                    await bus.publish_all(round_of(one, random_samples(6, seed=one, round_=one)))
            elif isinstance(record.message, BatchTrained):
                left.discard(record.message.round)
                if not left:
                    return


def cut_tail(directory: Path) -> None:
    """Take the second half of the stream EVENT and its index, as a power failure may."""
    (place,) = directory.rglob("EVENT_nano/msgs")
    (place / "index.db").unlink(missing_ok=True)
    blocks = sorted(place.glob("*.blk"), key=lambda path: int(path.stem))
    assert blocks
    for block in blocks:
        os.truncate(block, block.stat().st_size // 2 if block == blocks[0] else 0)


def newest_of(directory: Path) -> Checkpoint:
    found = newest(directory / "learner" / "checkpoints")
    assert found is not None
    return found


def optimizer_steps(checkpoint: Checkpoint) -> set[int]:
    return {int(one["step"]) for one in checkpoint.tensors().extra["optimizer"]["state"].values()}


async def test_a_run_that_lost_its_tail_goes_on_as_a_new_one(tmp_path: Path) -> None:
    old, new = tmp_path / "nano", tmp_path / "second"
    policy = make_policy(tmp_path / "policy")
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    model = f"model.path={policy}"
    async with running(tmp_path, "nano", model) as bus:
        await train(bus, 0, 1)
    saved = newest_of(old)
    assert (saved.state.version.step, optimizer_steps(saved)) == (2, {2})
    program = ProgramArchive(old).put("class Game: ...")
    record = MemoryRecord(design="d", environment=program, skill="Logic", closed=True)
    memory = MemoryState(closed=(record,))
    memory_store.write(
        old, memory_store.MemorySnapshot(run="nano", position=9, key="k", memory=memory, used={"doc": 3})
    )
    cut_tail(old / "bus")

    again = start(tmp_path, *SETTINGS, model)
    try:
        assert await ended(again) == 1
    finally:
        kill(again)
    assert "the server lost messages it had acknowledged" in output(tmp_path)
    assert "--salvage RUN" in output(tmp_path)

    async with running(tmp_path, "second", model, "--salvage", "nano") as bus:
        begun = read_tensors(min((new / "learner" / "checkpoints").iterdir()))
        await train(bus, 0)
    kept = saved.tensors()
    assert all(torch.equal(kept.model[name], begun.model[name]) for name in kept.model)
    last = newest_of(new)
    assert last.state.version.step == 1, "versions begin anew"
    assert last.state.lineage.forks == ((0, 0),)
    assert optimizer_steps(last) == {3}, "and the optimiser goes on"
    said = output(tmp_path)
    assert (
        "Kept: weights, optimiser, random numbers, accepted designs; 1 archived programs; the designer"
        in said
    )
    assert "the run had trained round 1" in said
    assert ProgramArchive(new).get(program) == "class Game: ..."
    remembered = memory_store.read(new)
    assert remembered is not None
    assert (remembered.run, remembered.position) == ("second", 0)
    assert (remembered.memory.closed, remembered.used) == ((record,), {"doc": 3})
