"""The plan of a run for ``--dry-run``: processes, command lines, ports and an estimate of memory."""

from __future__ import annotations

import json
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
from engine.running import role_host
from engine.running.supervisor import Address, child_command

GB = 1 << 30
_BASE = {"supervisor": 0.6, "broker": 0.1, "vllm": 1.2, "learner": 1.0}
_LEARNER_BYTES = 16  # fp32 weights and gradients, and Adam's two moments
_CPU_NOTE = "as for vLLM's CPU build, which is installed here; the GPU build gets other defaults"
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
    factors: dict[str, str] = {}


def make(config: Config, directory: RunDirectory) -> Plan:
    """Return the plan of ``config``; starts and writes nothing. Raises ConfigError for bad vLLM flags."""
    parameters = count_parameters(config)
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
    if "designer" in config.run.roles and config.designer.kind == "frozen":
        yield _frozen(config, parameters)
    for name in children:
        reference = 4 if config.learner.kl > 0 else 0
        trains = name == "learner"
        weights = parameters * (_LEARNER_BYTES + reference) / GB if trains else 0.0
        yield Process(
            name=name,
            command=shlex.join(child_command(name, config, address, directory.root)),
            port=None,
            memory_gb=_BASE["learner"] + weights,
            note="without activations; device memory where it has a device" if trains else "",
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
    weights = parameters * _DTYPE_BYTES[config.model.dtype] / GB
    weights *= launch.copies(config.server)
    for index in range(table.count):
        port = table.port + index if table.port else 0
        yield Process(
            name=f"vllm {index}",
            command=_command(config, launch.command(config, Path(_model(config)), port), index),
            port=port,
            memory_gb=_BASE["vllm"] + weights + cache,
            note=_CPU_NOTE if cache else "device memory where it has a device, plus its cache",
        )


def _frozen(config: Config, parameters: int) -> Process:
    """The server of a frozen designer, as large as one of the policy's."""
    table, own = config.designer.frozen, frozen.config_of(config)
    if table.url:
        return Process(name="frozen designer (adopted)", command=table.url, port=None, memory_gb=0.0)
    words = launch.command(own, Path(_model(own)), table.port, updates=False)
    server = next(_servers(own, parameters))
    return msgspec.structs.replace(server, name="frozen designer", command=_command(own, words))


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
    """Return how many parameters the model has: exact for a warm start, else from files or the name."""
    if config.model.path.startswith(models.WARMSTART):
        table = config.warmstart
        block = 4 * table.hidden_size**2 + 3 * table.hidden_size * table.intermediate_size
        return table.vocabulary * table.hidden_size + table.layers * block
    path = Path(config.model.path).expanduser()
    files = [file.stat().st_size for file in path.glob("*.safetensors")] if path.is_dir() else []
    if files:
        return sum(files) // _stored_bytes(path)
    named = re.search(r"(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", path.name, re.IGNORECASE)
    if named:
        return int(float(named[1]) * (10**9 if named[2].lower() == "b" else 10**6))
    return 135_000_000 if "smollm2" in config.model.path else None


def _stored_bytes(path: Path) -> int:
    """Return the bytes a parameter takes in the model's files."""
    try:
        settings = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return 2
    return 4 if "32" in str(settings.get("dtype") or settings.get("torch_dtype")) else 2


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
        lines.append("           That is more than this machine has, unless devices hold a part of it.")
    return "\n".join(lines)
