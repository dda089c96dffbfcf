"""The plan of a run for ``--dry-run``: processes, command lines, ports, and what they take and how long."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine import ablations, models
from engine.config import Config
from engine.errors import SpadeError
from engine.inference import frozen, launch
from engine.run import RunDirectory
from engine.running import capacity, role_host
from engine.running.supervisor import Address, child_command

GB = 1 << 30
_BASE = {"supervisor": 0.6, "broker": 0.1, "vllm": 1.2, "learner": 1.0}
_CPU_NOTE = "as for vLLM's CPU build, which is installed here; the GPU build gets other defaults"
_LEARNER_NOTE = "while it loads weights, or writes a checkpoint"
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "auto": 2}


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process: its command line as it will be, its port (0: a free one), its memory in GB."""

    name: str
    command: str
    port: int | None
    memory_gb: float
    note: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved plan of a run. ``parameters`` is None when the model cannot be seen from here."""

    run: str
    directory: str
    resumes: bool
    model: str
    parameters: int | None
    processes: tuple[Process, ...]
    memory_gb: float
    memory_here_gb: float
    needs: tuple[str, ...] = ()
    factors: dict[str, str] = {}


def make(config: Config, directory: RunDirectory) -> Plan:
    """Return the plan of ``config``; starts and writes nothing. Raises ConfigError for bad vLLM flags."""
    shape = capacity.shape_of(config)
    parameters = shape.parameters if shape else count_parameters(config)
    processes = tuple(_processes(config, directory, parameters or 0))
    return Plan(
        run=config.run.name,
        directory=str(directory.root),
        resumes=directory.config_file.exists(),
        model=config.model.path,
        parameters=parameters,
        processes=processes,
        memory_gb=sum(process.memory_gb for process in processes),
        memory_here_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB,
        needs=tuple(capacity.needs(config, shape, directory.database)),
        factors=ablations.factors(config),
    )


def _processes(config: Config, directory: RunDirectory, parameters: int) -> Iterator[Process]:
    children = [name for name in config.run.roles if role_host.load(name).own_process]
    here = [name for name in config.run.roles if name not in children]
    live = config.sandbox.max_live or 32
    yield Process(
        name="supervisor",
        command=f"spade run ({', '.join(here)}, recorder)",
        port=None,
        memory_gb=_BASE["supervisor"] + live * 16 / 1024,
        note=f"programs run in the sandbox, at most {config.sandbox.memory_mb} MB each",
    )
    if config.bus.url:
        address = Address(config.bus.url, "", config.run.name)
    else:
        address = Address(f"nats://{launch.LOOPBACK}:{config.bus.port or 'PORT'}", "", config.run.name)
        yield Process(
            name="broker",
            command=f"nats-server with its store in {directory.bus} (at most {config.bus.store_gb:g} GB)",
            port=config.bus.port,
            memory_gb=_BASE["broker"],
        )
    if "server" in config.run.roles:
        yield from _servers(config, parameters)
    if "designer" in config.run.roles and "frozen" in (config.designer.kind, config.designer.judge):
        yield _frozen(config, parameters)
    for name in children:
        trains = name == "learner"
        weights = parameters * _learner_bytes(config) / GB if trains else 0.0
        yield Process(
            name=name,
            command=shlex.join(child_command(name, config, address, directory.root)),
            port=None,
            memory_gb=_BASE["learner"] + weights,
            note="" if not trains else _LEARNER_NOTE if config.learner.devices else "without activations",
        )


def _servers(config: Config, parameters: int) -> Iterator[Process]:
    table = config.server
    for url in table.urls:
        yield Process(
            name="vllm (adopted)", command=url, port=None, memory_gb=0.0, note=_adoptable(config, url)
        )
    if table.urls:
        return
    cache = float(table.environment.get("VLLM_CPU_KVCACHE_SPACE", 2)) if launch.on_cpu() else 0.0
    weights = 0.0 if table.devices else parameters * _DTYPE_BYTES[config.model.dtype] / GB
    weights *= launch.copies(table)
    for index in range(table.count):
        port = table.port + index if table.port else 0
        yield Process(
            name=f"vllm {index}",
            command=_command(config, launch.command(config, Path(_model(config)), port), index),
            port=port,
            memory_gb=_BASE["vllm"] + weights + cache,
            note=_CPU_NOTE if cache else "" if table.devices else "and its cache",
        )


def _frozen(config: Config, parameters: int) -> Process:
    """The server of a frozen designer, as large as one of the policy's."""
    table, own = config.designer.frozen, frozen.config_of(config)
    if table.url:
        return Process(name="frozen designer (adopted)", command=table.url, port=None, memory_gb=0.0)
    words = launch.command(own, Path(_model(own)), table.port, updates=False)
    server = next(_servers(own, parameters))
    return msgspec.structs.replace(server, name="frozen designer", command=_command(own, words))


def _learner_bytes(config: Config) -> int:
    """Return the bytes of host memory of a parameter: all of it, or on devices what passes through the host.

    Each process loads the weights in float32, and the reference; rank 0 gathers a checkpoint.
    """
    learner = config.learner
    models, state = 1 + (learner.kl > 0 and not learner.lora.rank), 0 if learner.lora.rank else 12
    return max(state, 4 * models * len(learner.devices)) if learner.devices else state + 4 * models


def _adoptable(config: Config, url: str) -> str:
    try:
        words = shlex.join(launch.external_command(config, _model(config), url))
    except SpadeError:  # a host without vLLM may well adopt the servers of others
        return "docs/weights.md says with which flags it must have been started"
    return f"must have been started with: {words}"


def _model(config: Config) -> str:
    """Return the model's directory, or a placeholder for a model that is built or unpacked at the start."""
    path = config.model.path
    return "MODEL" if not path or path.startswith((models.WARMSTART, models.PACKAGE, models.HUB)) else path


def _command(config: Config, words: list[str], index: int = 0) -> str:
    values = (f"{key}={value}" for key, value in launch.settings(config, index).items())
    return shlex.join(["env", *values, *words])


def count_parameters(config: Config) -> int | None:
    """Return about how many parameters a model of an unknown shape has: by its files or its name."""
    path = Path(config.model.path).expanduser()
    files = [file.stat().st_size for file in path.glob("*.safetensors")] if path.is_dir() else []
    if files:
        return sum(files) // (4 if config.model.dtype == "float32" else 2)
    named = re.search(r"(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", path.name, re.IGNORECASE)
    if named:
        return int(float(named[1]) * (10**9 if named[2].lower() == "b" else 10**6))
    return 135_000_000 if "smollm2" in config.model.path else None


def render(plan: Plan) -> str:
    """Return the plan as text."""
    size = "of unknown size"
    if plan.parameters is not None:
        large = plan.parameters >= 1e9
        size = f"{plan.parameters / (1e9 if large else 1e6):,.1f} {'B' if large else 'M'} parameters"
    lines = [
        f"run        {plan.run}",
        f"directory  {plan.directory} ({'resumes' if plan.resumes else 'new'})",
        f"model      {plan.model} ({size})",
        "factors",
        *(f"  {name:<12} {value}" for name, value in plan.factors.items()),
        "processes",
    ]
    for process in plan.processes:
        port = "" if process.port is None else f", port {process.port or 'free'}"
        lines.append(f"  {process.name:<12} about {process.memory_gb:.1f} GB{port}")
        lines.append(f"    {process.command}")
        if process.note:
            lines.append(f"    ({process.note})")
    lines.append(
        f"memory     about {plan.memory_gb:.1f} GB in all; this machine has {plan.memory_here_gb:.0f} GB"
    )
    if plan.memory_gb > plan.memory_here_gb:
        lines.append("           That is more than this machine has.")
    lines += plan.needs
    return "\n".join(lines)
