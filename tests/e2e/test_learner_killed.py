"""The learner as a real process on a real broker, killed twice: nothing lost, nothing trained twice (I7)."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import structlog
from learner_fakes import make_policy, random_samples, round_closed
from scenes.memory_bus import MemoryBus

from bus import Bus, connect, provision, serve
from bus.concurrency import flat_task_group
from bus.messages import BatchTrained, PolicyPublished
from engine.config import Config, LearnerConfig, ModelConfig, OptimizerConfig, RunConfig
from engine.context import RoleContext
from engine.lineage import Lineage, Version
from engine.running.role_host import Origin, put_origin

pytestmark = [
    pytest.mark.long,  # what test_kill_anywhere.py shows of a whole run, with more kills of the learner alone
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
ROUNDS = 12


def make_config(policy: Path, checkpoint_every: int) -> Config:
    return Config(
        run=RunConfig(name="learn"),
        model=ModelConfig(path=str(policy), max_model_len=128),
        learner=LearnerConfig(
            optimizer=OptimizerConfig(learning_rate=1e-3),
            checkpoint_every=checkpoint_every,
            micro_batch_tokens=256,
        ),
    )


async def publish_rounds(bus: Bus) -> set[str]:
    sent: set[str] = set()
    for number in range(ROUNDS):
        samples = random_samples(40, seed=number, round_=number)
        samples += random_samples(10, seed=50 + number, role="designer", round_=number)
        sent |= {one.sample for one in samples}
        last = number == ROUNDS - 1
        await bus.publish_all(samples)
        await bus.publish(round_closed(number, plays=50, designs=12, agents=40, designers=10, final=last))
    return sent


async def undisturbed(config: Config, directory: Path) -> str:
    """The digest of the final weights of a learner that nobody kills."""
    from roles.learner.role import LearnerRole as Role

    bus = MemoryBus(run="learn", role="scorer", instance="0")
    await publish_rounds(bus)
    role = Role(RoleContext(config, bus.peer("learner", "0"), directory, "calm", structlog.get_logger()))
    async with flat_task_group() as tasks:
        tasks.start_soon(role.run)
        await until(bus, lambda message: isinstance(message, BatchTrained) and message.final)
        role.context.draining.set()
    last = await bus.last("event.learner.published")
    assert last is not None
    assert isinstance(last.message, PolicyPublished)
    return last.message.sha256


async def until(bus: Bus, done: Any, start: int = 1) -> int:
    """Wait for the first event that is ``done``; returns the sequence after it."""
    async with bus.follow("EVENT", start=start) as records:
        async for record in records:
            if done(record.message):
                return record.sequence + 1
    raise AssertionError


def published(step: int) -> Any:
    return lambda message: isinstance(message, PolicyPublished) and message.step == step


@pytest.mark.parametrize("checkpoint_every", [1, 3])
async def test_killed_twice_it_trains_every_sample_once(checkpoint_every: int, tmp_path: Path):
    config = make_config(make_policy(tmp_path / "policy"), checkpoint_every)
    expected = await undisturbed(config, tmp_path / "calm")
    place = tmp_path / "run"
    place.mkdir()
    async with serve(tmp_path / "bus", run="learn", store_gb=1.0) as server:
        await provision(server.url, run="learn", token=server.token, store_gb=1.0)
        command = [sys.executable, "-m", "engine.cli", "role", "learner", "--connect", server.url]
        command += ["--run", "learn", "--directory", str(place)]
        environment = {**os.environ, "SPADE_BUS_TOKEN": server.token, "OMP_NUM_THREADS": "1"}
        async with connect(server.url, run="learn", role="test", instance="0", token=server.token) as bus:
            await put_origin(bus, Origin(config, socket.gethostname(), str(place)))
            sent = await publish_rounds(bus)
            seen = 1
            for step in (4, 8, None):
                process = await anyio.open_process(command, env=environment, stdout=None, stderr=None)
                try:
                    if step is None:
                        await until(bus, lambda message: isinstance(message, BatchTrained) and message.final)
                        process.send_signal(signal.SIGTERM)
                        with anyio.fail_after(20):
                            assert await process.wait() == 0
                    else:
                        seen = await until(bus, published(step), seen)
                        process.kill()
                        await process.wait()
                finally:
                    if process.returncode is None:
                        process.kill()
                        await process.wait()
            events = [record.message async for record in bus.replay("EVENT")]
            stored = await bus.state_get("lineage")
            left = await bus.stream_info("SAMPLE")
    assert stored is not None
    lineage = msgspec.json.decode(stored[1], type=Lineage)
    batches = {
        message.round: message
        for message in events
        if isinstance(message, BatchTrained) and lineage.survives(Version.unpack(message.version))
    }
    assert sorted(batches) == list(range(ROUNDS))
    ends = Counter(name for batch in batches.values() for name in batch.trained)
    ends.update(name for batch in batches.values() for name, _ in batch.dropped)
    assert ends == Counter(dict.fromkeys(sent, 1))
    policies = [message for message in events if isinstance(message, PolicyPublished)]
    assert policies[-1].step == batches[ROUNDS - 1].step
    assert policies[-1].sha256 == expected
    digests: dict[int, set[str]] = {}
    for policy in policies:
        digests.setdefault(policy.version, set()).add(policy.sha256)
    assert all(len(found) == 1 for found in digests.values())
    assert left.messages <= 3 * 51, "no more than what came after the checkpoint before the last"
