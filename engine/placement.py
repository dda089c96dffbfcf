"""Placement: the devices of servers, learner and frozen designer, and the command lines that follow.

Server ``i`` gets as many of ``[server] devices`` as it has workers, in order. A learner with one of
``[learner] devices`` is one process; with several it is sharded over them (FSDP2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from engine.config import Config, ServerConfig
from engine.errors import ConfigError, Problem

VISIBLE = "CUDA_VISIBLE_DEVICES"
PROGRAMS = ("python", "accelerate", "torchrun")
"""Launchers that lie beside the interpreter, which need not be on PATH."""
_MEETING = {
    "torchrun": ("--nnodes", "--node-rank", "--master-addr", "--master-port"),
    "accelerate": ("--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port"),
}
_SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


class Meeting(NamedTuple):
    """The hosts of one learner: their number, the rank of this one, the first one's address and port."""

    hosts: int = 1
    rank: str = "0"
    first: str = ""
    port: str = ""


def arguments(server: ServerConfig) -> dict[str, str | int | float | bool]:
    """Return ``[server.args]`` as vLLM spells its flags."""
    return {key.lstrip("-").replace("_", "-"): value for key, value in server.args.items()}


def workers(server: ServerConfig) -> int:
    """Return how many workers, each with a device, a server has by its flags.

    Raises ConfigError for a size that is no number.
    """
    return math.prod(_number(server, flag) for flag in _SIZES)


def nodes(server: ServerConfig) -> int:
    """Return over how many hosts a server's workers are spread by vLLM's multiprocessing.

    Raises ConfigError where they cannot be.
    """
    found = _number(server, "nnodes")
    if found < 1 or workers(server) % found:
        raise ConfigError(
            f"server.args.nnodes = {found} must divide the {workers(server)} workers of a server",
            where="server.args",
        )
    return found


def _number(server: ServerConfig, flag: str) -> int:
    value = arguments(server).get(flag, 1)
    if not isinstance(value, int):
        raise ConfigError(f"server.args.{flag} = {value!r} must be a number", where="server.args")
    return value


def of_server(config: Config, index: int) -> dict[str, str]:
    """Return the environment that gives server ``index`` its devices, empty without ``server.devices``."""
    each, devices = workers(config.server) // nodes(config.server), config.server.devices
    return _visible(devices[index * each : (index + 1) * each]) if devices else {}


def learner_launch(config: Config, meeting: Meeting | None = None) -> list[str]:
    """Return the words before ``-m engine.cli`` in the learner's command line, on one of several hosts.

    Raises ConfigError for a launcher that cannot start processes on several hosts.
    """
    learner, devices = config.learner, config.learner.devices
    place = ["env", *(f"{key}={value}" for key, value in _visible(devices).items())] if devices else []
    hosts = meeting.hosts if meeting else 1
    words = list(learner.launch)
    if not words and shards(config):
        words = _sharded(len(devices) * hosts, learner.precision)
    words = words or (["python", "-P"] if hosts == 1 else ["torchrun", "--nproc-per-node", "1"])
    if meeting and hosts > 1:
        flags = _MEETING.get(words[0])
        if flags is None:
            raise ConfigError(
                f"learner.launch begins with {words[0]!r}, which cannot start a learner on {hosts} hosts.",
                where="learner.launch",
                remedy=f"Begin with {' or '.join(_MEETING)}, or leave it out.",
            )
        at = 2 if words[0] == "accelerate" else 1
        values = (str(hosts), *meeting[1:])
        words[at:at] = [word for pair in zip(flags, values, strict=True) for word in pair]
    elif words[0] == "accelerate" and not learner.launch:
        words[2:2] = ["--num_machines", "1"]
    return [*place, *words]


def _sharded(processes: int, precision: str) -> list[str]:
    return [
        "accelerate", "launch", "--num_processes", str(processes),
        "--mixed_precision", "bf16" if precision == "bf16" else "no", "--dynamo_backend", "no",
        "--use_fsdp", "--fsdp_version", "2",
        "--fsdp_reshard_after_forward", "true", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
        "--fsdp_state_dict_type", "FULL_STATE_DICT", "--fsdp_cpu_ram_efficient_loading", "false",
    ]  # fmt: skip


def shards(config: Config) -> bool:
    """Return whether the learner's weights are sharded over several processes."""
    learner = config.learner
    if learner.launch:
        return "--use_fsdp" in learner.launch
    return len(learner.devices) * config.launch.hosts.get("learner", 1) > 1


def check(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with the devices of the roles that this host starts."""
    server = config.server
    named = dict(places(config))
    for key, devices in named.items():
        if len(set(devices)) < len(devices) or min(devices, default=0) < 0:
            yield key, f"= {list(devices)}: each device has a number from 0 on, and is named once"
    for (one, first), (other, second) in combinations(named.items(), 2):
        if common := sorted(set(first) & set(second)):
            yield other, f"names device {common[0]}, which {one} has"
    if server.urls:
        if server.devices:
            yield "server.devices", "are for servers that are started here; server.urls names running ones"
    elif named.get("server.devices"):
        each = workers(server) // nodes(server)
        if len(server.devices) != server.count * each:
            yield (
                "server.devices",
                f"names {len(server.devices)} devices; server.count = {server.count} with {each} a server "
                f"({' x '.join(_SIZES)}) need {server.count * each}",
            )
    for key, table in (("server", server), ("designer.frozen", config.designer.frozen)):
        if VISIBLE in table.environment:
            yield f"{key}.environment", f"must not set {VISIBLE}: {key}.devices does, for each server its own"
    if any(named.values()):
        for key, devices in named.items():
            if not devices:
                yield key, f"must be set, as {', '.join(key for key in named if named[key])} is"


def require_devices(config: Config) -> None:
    """Check that this host has the devices that its roles are given. Raises ConfigError."""
    found = device_count()
    for key, devices in places(config):
        if found is not None and max(devices, default=-1) >= found:
            raise ConfigError(
                f"{key} names device {max(devices)}, and this host has {found or 'none'}",
                where=key,
                remedy="Devices are numbered from 0; `nvidia-smi -L` lists them.",
            )


def device_count() -> int | None:
    """Return how many NVIDIA devices the kernel shows, None on a host with accelerators of another kind."""
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return None if not found and Path("/dev/kfd").exists() else found


def places(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the devices of each part that a host with ``run.roles`` starts, with the key that names them."""
    roles, frozen = config.run.roles, config.designer.frozen
    if "server" in roles and not config.server.urls:
        yield "server.devices", config.server.devices
    if "learner" in roles:
        yield "learner.devices", config.learner.devices
    if "designer" in roles and config.designer.starts_frozen:
        yield "designer.frozen.devices", frozen.devices


def _visible(devices: tuple[int, ...]) -> dict[str, str]:
    return {VISIBLE: ",".join(map(str, devices))}
