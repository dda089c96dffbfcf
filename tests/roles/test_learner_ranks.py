"""The learner role on two processes, launched as the supervisor launches it, on a real broker."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest
from learner_fakes import make_policy, random_samples, round_of, sampled
from scenes.brokers import free_ports

from bus import Bus, connect, provision, serve
from bus.messages import BatchTrained, PolicyPublished
from engine.config import Config, LearnerConfig, ModelConfig, OptimizerConfig, RunConfig
from engine.inference.guarded import guarded
from engine.running import drain_commands, role_host
from engine.running.role_host import Origin
from engine.running.supervisor import Address, child_command
from engine.training.checkpoint import newest

pytestmark = pytest.mark.timeout(400)


async def until(bus: Bus, kind: type[Any], done: Callable[[Any], bool] = lambda _: True) -> Any:
    with anyio.fail_after(270):
        async with bus.follow("EVENT") as records:
            async for record in records:
                if isinstance(record.message, kind) and done(record.message):
                    return record.message
    raise AssertionError


def ranks_of(pid: int) -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process(pid).children(recursive=True)
        if "engine.cli" in process.cmdline() and "RANK" in process.environ()
    ]


TORCHRUN = ("torchrun", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port")


@pytest.mark.parametrize(
    ("launch", "end"),
    [
        pytest.param(TORCHRUN, "drained", marks=pytest.mark.slow, id="drained"),
        pytest.param(TORCHRUN, "killed", marks=pytest.mark.long, id="killed"),
    ],
)
async def test_two_processes_are_one_learner(launch: tuple[str, ...], end: str, tmp_path: Path):
    policy = make_policy(tmp_path / "policy")
    config = Config(
        run=RunConfig(name="two"),
        model=ModelConfig(path=str(policy), max_model_len=128),
        learner=LearnerConfig(
            optimizer=OptimizerConfig(learning_rate=1e-3),
            step_seconds=250.0,
            launch=(*launch, str(free_ports(1)[0])),
        ),
    )
    home = tmp_path / "runs"
    async with serve(tmp_path / "bus", run="two") as server:
        await provision(server.url, run="two", token=server.token)
        async with connect(
            server.url, run="two", token=server.token, role="supervisor", instance="supervisor"
        ) as bus:
            await role_host.put_origin(bus, Origin(config, socket.gethostname(), str(home), str(policy)))
            address = Address(server.url, server.token, "two")
            command = child_command("learner", config, address, home)
            environment = address.environment() | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            log = tmp_path / "learner.out"
            async with guarded(command, log=log, environment=environment) as process:
                await until(bus, PolicyPublished)
                ranks = ranks_of(process.pid)
                assert sorted(one.environ()["RANK"] for one in ranks) == ["0", "1"]
                samples = random_samples(6, seed=1, round_=0)
                await bus.publish_all(round_of(0, samples, final=True))
                trained = await until(bus, BatchTrained, lambda batch: batch.final)
                if end == "drained":
                    await drain_commands.give(bus, "drain")
                    with anyio.fail_after(90):
                        assert await process.wait() == 0, log.read_text()
                else:
                    process.kill()
            _, alive = psutil.wait_procs(ranks, timeout=10)
            assert not alive
    assert set(trained.trained) == {sampled(one).sample for one in samples}
    assert trained.metrics["loss"] == pytest.approx(trained.metrics["loss_agent"])
    found = newest(home / "learner" / "checkpoints")
    assert found is not None
    assert found.state.version.step == 1
    announced = msgspec.structs.replace(trained, metrics={})
    assert found.state.announced is not None
    assert msgspec.structs.replace(found.state.announced, metrics={}) == announced
