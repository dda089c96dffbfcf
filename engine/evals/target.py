"""The judged model: a folder or a checkpoint on a vLLM server of its own, or an endpoint."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import msgspec

from engine import models, run
from engine.config import (
    AgentConfig,
    BusConfig,
    Config,
    EndpointConfig,
    FrozenConfig,
    LearnerConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    ServerConfig,
)
from engine.errors import ConfigError, SpadeError
from engine.evals.text_policies import CONTEXT, TextChat, endpoint_pool
from engine.inference import launch
from engine.inference.endpoint import open_endpoint

Thinking = Literal["off", "on", "unset"]
START = "start"
_PROBE_TOKENS = 16
_CPU_CONCURRENCY, _GPU_CONCURRENCY, _ENDPOINT_CONCURRENCY = 16, 256, 32
_CPU_SERVER = ServerConfig(
    environment={"VLLM_CPU_KVCACHE_SPACE": "2"}, request_seconds=3600.0, start_seconds=600.0
)
_GPU_SERVER = ServerConfig(request_seconds=3600.0, start_seconds=1800.0)


@dataclass(frozen=True)
class Target:
    """A model to judge. ``config`` has its server and the rules of a play, ``record`` names it in results.

    ``checkpoint`` is exported from the run in ``run_root`` first, "" where ``config`` names the weights.
    """

    config: Config
    record: dict[str, Any]
    endpoint: EndpointConfig | None = None
    user: EndpointConfig | None = None
    run_root: Path | None = None
    checkpoint: str = ""
    concurrency: int = field(default=0)

    @property
    def places(self) -> int:
        """The number of samples that are played at a time."""
        if self.endpoint is not None:
            return self.concurrency or _ENDPOINT_CONCURRENCY
        return self.concurrency or (_CPU_CONCURRENCY if launch.on_cpu() else _GPU_CONCURRENCY)


def of_model(path: str, *, thinking: Thinking, context: int, concurrency: int) -> Target:
    """Return the target for a folder, ``package:NAME`` or ``hub:OWNER/NAME``."""
    cpu = launch.on_cpu()
    server = _CPU_SERVER if cpu else _GPU_SERVER
    model = ModelConfig(path=path, max_model_len=1, dtype="float32" if cpu else "auto", thinking=thinking)
    config = Config(run=RunConfig(name="eval"), model=model, server=server)
    home = models.resolve(config, Path.cwd())
    longest = json.loads((home / "config.json").read_text()).get("max_position_embeddings") or 32768
    length = min(int(longest), context or (8192 if cpu else 40960))
    config = msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(model, path=str(home), max_model_len=length),
        agent=AgentConfig(context_tokens=length, episode_seconds=server.request_seconds),
    )
    return Target(config, {"model": path, "thinking": thinking, "context": length}, concurrency=concurrency)


def of_run(name: str, *, directory: Path, thinking: Thinking | None, concurrency: int) -> Target:
    """Return the target for ``RUN``, ``RUN@STEP``, ``RUN@best`` or ``RUN@start`` (its first weights)."""
    name, _, checkpoint = name.partition("@")
    found = run.find(name or None, directory)
    config = found.config()
    base = found.starting_model()
    if base is None:
        raise ConfigError("The run has not started yet.", where=str(found.root))
    replace = msgspec.structs.replace
    if thinking is not None:
        config = replace(config, model=replace(config.model, thinking=thinking))
    config = replace(
        config,
        model=replace(config.model, path=str(base)),
        bus=BusConfig(),
        learner=LearnerConfig(),
        designer=replace(config.designer, frozen=FrozenConfig()),
    )
    record = {"run": found.root.name, "checkpoint": checkpoint or "last", "thinking": config.model.thinking}
    chosen = "" if checkpoint == START else checkpoint or "last"
    return Target(config, record, run_root=found.root, checkpoint=chosen, concurrency=concurrency)


def of_endpoint(settings: EndpointConfig, *, concurrency: int) -> Target:
    """Return the target for an OpenAI-compatible endpoint; its template and context are its own."""
    agent = AgentConfig(
        context_tokens=CONTEXT, play_tokens=CONTEXT, episode_seconds=settings.request_seconds * 2
    )
    model = ModelConfig(path="", max_model_len=CONTEXT)
    config = Config(run=RunConfig(name="eval"), model=model, agent=agent)
    record = {"endpoint": settings.base_url, "model": settings.model, "thinking": "the endpoint's default"}
    return Target(config, record, endpoint=settings, concurrency=concurrency)


@asynccontextmanager
async def opened_user(settings: EndpointConfig | None) -> AsyncIterator[tuple[Any, Any] | None]:
    """Yield pool and chat format of the simulated user's endpoint, None without one."""
    if settings is None:
        yield None
        return
    async with open_endpoint(settings) as endpoint:
        yield endpoint_pool(endpoint), TextChat()


@asynccontextmanager
async def opened(target: Target, directory: Path) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the target's pool and chat format; logs and an exported checkpoint lie in ``directory``."""
    if target.endpoint is not None:
        async with open_endpoint(target.endpoint) as endpoint:
            yield endpoint_pool(endpoint), TextChat()
        return
    from engine.inference.frozen import open_frozen
    from engine.inference.tokens import ChatTokens

    config, replace = target.config, msgspec.structs.replace
    if target.checkpoint:
        assert target.run_root is not None
        folder = directory / "model"
        if not (folder / "config.json").exists():
            await anyio.to_thread.run_sync(_export, target.run_root, target.checkpoint, folder)
        config = replace(config, model=replace(config.model, path=str(folder)))
    designer = replace(config.designer, concurrency=target.places, designs_per_ticket=1)
    config = replace(config, designer=designer)
    home = await anyio.to_thread.run_sync(models.resolve, config, directory)
    chat = await anyio.to_thread.run_sync(lambda: ChatTokens(home, thinking=config.model.thinking))
    async with open_frozen(config, directory, name="server") as pool:
        yield pool, chat


async def tokens_per_second(pool: Any, chat: Any, places: int) -> float:
    """Measure the speed of ``places`` requests at a time by a few tokens each."""
    sampling = SamplingConfig(max_tokens=_PROBE_TOKENS)
    prompt = chat.first("Count from one to a hundred.")
    counted = 0

    async def one(number: int) -> None:
        nonlocal counted
        found = await pool.generate(prompt, sampling=sampling, key=f"probe{number}", stop_token_ids=())
        counted += len(found.tokens)

    await one(0)  # the first request waits for the server, and warms it
    counted, started = 0, time.monotonic()
    async with anyio.create_task_group() as tasks:
        for number in range(places):
            tasks.start_soon(one, number)
    return counted / (time.monotonic() - started)


def _export(root: Path, checkpoint: str, folder: Path) -> None:
    """Export a checkpoint in a process of its own: it needs torch, and this one does not."""
    command = [sys.executable, "-P", "-m", "engine.cli", "export", str(root), str(folder)]
    done = subprocess.run([*command, "--checkpoint", checkpoint], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SpadeError(
            f"The checkpoint {checkpoint} cannot be exported: {done.stderr.strip() or done.returncode}"
        )
