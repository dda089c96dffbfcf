"""Scenes of evaluations: a seat with a scripted model, and an endpoint beside a command in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from scenes.endpoint_fake import FakeEndpoint, Script, fake_endpoint

from engine.config import Config, ModelConfig, RunConfig, SamplingConfig
from engine.evals.text_policies import CONTEXT, TextChat, scripted_pool
from roles.agent.episode import Rules
from roles.evaluator.seat import Seat, Table

CONFIG = Config(run=RunConfig(name="eval"), model=ModelConfig(path="", max_model_len=CONTEXT))


def table(reply: Callable[[str, list[str]], str], sandbox: Any = None) -> Table:
    """Return a table whose model answers with ``reply(key, messages)``."""
    rules = Rules(sampling=SamplingConfig(), max_turns=25, context_tokens=CONTEXT, prompt="full")
    return Table(scripted_pool(reply), TextChat(), sandbox, rules, seconds=60.0)


def seat(*replies: str, sandbox: Any = None) -> Seat:
    """Return a seat whose model gives ``replies`` in turn, the last one again and again."""
    waiting = list(replies)

    def reply(key: str, messages: list[str]) -> str:
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    return table(reply, sandbox).seat("sample", SamplingConfig())


@contextmanager
def endpoint_thread(script: Script) -> Iterator[FakeEndpoint]:
    """Serve a fake endpoint from a thread with a loop of its own."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    found: list[FakeEndpoint] = []
    stop = asyncio.Event()

    async def serve() -> None:
        async with fake_endpoint(script) as fake:
            found.append(fake)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
