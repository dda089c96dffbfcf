"""An inference pool over fake servers: facts about them, and requests."""

from __future__ import annotations

from typing import Any

from bus.messages import ServerLost, ServerServing
from engine.config import SamplingConfig
from engine.inference.completion import Completion
from engine.inference.pool import InferencePool
from scenes.fake_vllm import STOP, FakeVllm

GENERATE = "/inference/v1/generate"


def announced(fake: FakeVllm, name: str = "a", version: int = 1, *, epoch: str = "1") -> ServerServing:
    """The fact that ``fake`` serves ``version``."""
    return ServerServing(
        server=name, epoch=epoch, url=fake.url, version=version, canary_error=0.0, seconds=0.0
    )


def serving(fake: FakeVllm, name: str = "a", version: int = 1, *, epoch: str = "1") -> ServerServing:
    """Let ``fake`` have ``version``; the fact that it serves it."""
    fake.version = fake.loaded = str(version)
    return announced(fake, name, version, epoch=epoch)


def lost(name: str = "a", epoch: str = "1") -> ServerLost:
    return ServerLost(server=name, epoch=epoch, reason="test")


def new_pool(**settings: Any) -> InferencePool:
    return InferencePool(**{"max_concurrency": 16, "request_seconds": 15.0, "stuck_seconds": 0.2, **settings})


async def ask(pool: InferencePool, key: str = "e", deadline: float | None = None, **more: Any) -> Completion:
    return await pool.generate(
        [1, 2, 3],
        sampling=SamplingConfig(max_tokens=8),
        key=key,
        stop_token_ids=[STOP],
        deadline=deadline,
        **more,
    )
