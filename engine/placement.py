"""Placement: the devices of servers, learner and frozen designer, and the command lines that follow.

Server ``i`` gets as many of ``[server] devices`` as it has workers, in order. A learner with one of
``[learner] devices`` is one process; with several it is sharded over them (FSDP2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from engine.config import Config, ServerConfig
from engine.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
Problem = tuple[str, str]
_SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


def arguments(server: ServerConfig) -> dict[str, str | int | float | bool]:
    """Return ``[server.args]`` as vLLM spells its flags."""
    return {key.lstrip("-").replace("_", "-"): value for key, value in server.args.items()}


def workers(server: ServerConfig) -> int:
    """Return how many workers, each with a device, a server has by its flags.

    Raises ConfigError for a size that is no number.
    """
    sizes = {flag: arguments(server).get(flag, 1) for flag in _SIZES}
    for flag, size in sizes.items():
        if not isinstance(size, int):
            raise ConfigError(f"server.args.{flag} = {size!r} must be a number", where="server.args")
    return math.prod(size for size in sizes.values() if isinstance(size, int))


def of_server(config: Config, index: int) -> dict[str, str]:
    """Return the environment that gives server ``index`` its devices, empty without ``server.devices``."""
    each, devices = workers(config.server), config.server.devices
    return _visible(devices[index * each : (index + 1) * each]) if devices else {}


def learner_launch(config: Config) -> list[str]:
    """Return the words before ``-m engine.cli`` in the learner's command line."""
    learner, devices = config.learner, config.learner.devices
    place = ["env", *(f"{key}={value}" for key, value in _visible(devices).items())] if devices else []
    if learner.launch or len(devices) < 2:
        return [*place, *(learner.launch or ("python", "-P"))]
    precision = "bf16" if learner.precision == "bf16" else "no"
    return [
        *place, "accelerate", "launch", "--num_processes", str(len(devices)), "--num_machines", "1",
        "--mixed_precision", precision, "--dynamo_backend", "no", "--use_fsdp", "--fsdp_version", "2",
        "--fsdp_reshard_after_forward", "true", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
        "--fsdp_state_dict_type", "FULL_STATE_DICT", "--fsdp_cpu_ram_efficient_loading", "false",
    ]  # fmt: skip


def shards(config: Config) -> bool:
    """Return whether the learner's weights are sharded over several processes."""
    learner = config.learner
    return "--use_fsdp" in learner.launch if learner.launch else len(learner.devices) > 1


def check(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with the devices of the roles that this host starts."""
    server = config.server
    places = dict(_places(config))
    for key, devices in places.items():
        if len(set(devices)) < len(devices) or min(devices, default=0) < 0:
            yield key, f"= {list(devices)}: each device has a number from 0 on, and is named once"
    for (one, first), (other, second) in combinations(places.items(), 2):
        if common := sorted(set(first) & set(second)):
            yield other, f"names device {common[0]}, which {one} has"
    if server.urls:
        if server.devices:
            yield "server.devices", "are for servers that are started here; server.urls names running ones"
    elif places.get("server.devices"):
        each = workers(server)
        if len(server.devices) != server.count * each:
            yield (
                "server.devices",
                f"names {len(server.devices)} devices; server.count = {server.count} with {each} a server "
                f"({' x '.join(_SIZES)}) need {server.count * each}",
            )
    for key, table in (("server", server), ("designer.frozen", config.designer.frozen)):
        if VISIBLE in table.environment:
            yield f"{key}.environment", f"must not set {VISIBLE}: {key}.devices does, for each server its own"
    if any(places.values()):
        for key, devices in places.items():
            if not devices:
                yield key, f"must be set, as {', '.join(key for key in places if places[key])} is"


def require_devices(config: Config) -> None:
    """Check that this host has the devices that its roles are given. Raises ConfigError."""
    found = device_count()
    for key, devices in _places(config):
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


def _places(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the devices of each part that this host starts, with the key that names them."""
    roles, frozen = config.run.roles, config.designer.frozen
    if "server" in roles and not config.server.urls:
        yield "server.devices", config.server.devices
    if "learner" in roles:
        yield "learner.devices", config.learner.devices
    if "designer" in roles and config.designer.starts_frozen:
        yield "designer.frozen.devices", frozen.devices


def _visible(devices: tuple[int, ...]) -> dict[str, str]:
    return {VISIBLE: ",".join(map(str, devices))}
