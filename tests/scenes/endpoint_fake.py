"""Servers over real HTTP that answer as told: an OpenAI-compatible endpoint, and a vLLM that talks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from scenes.fake_vllm import FakeVllm


@dataclass(frozen=True)
class Say:
    """A well-formed answer."""

    text: str
    finish: str = "stop"


@dataclass(frozen=True)
class Raw:
    """A body of our own, with a status and headers."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Drop:
    """Close the connection without an answer."""


class Hang:
    """Do not answer at all."""


Behaviour = Say | Raw | Drop | Hang
Script = Callable[[str], Behaviour]


async def odd(request: web.Request, behaviour: Behaviour) -> web.StreamResponse:
    """Do what no proper server does."""
    if isinstance(behaviour, Raw):
        return web.Response(body=behaviour.body, status=behaviour.status, headers=behaviour.headers)
    if isinstance(behaviour, Hang):
        await asyncio.Event().wait()
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@dataclass
class FakeEndpoint:
    """``/v1/chat/completions``. ``script`` gets the last message; ``bodies`` and ``keys`` are what came."""

    script: Script
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.keys.append(request.headers.get("Authorization", ""))
        behaviour = self.script(body["messages"][-1]["content"])
        if not isinstance(behaviour, Say):
            return await odd(request, behaviour)
        message = {"role": "assistant", "content": behaviour.text}
        choice = {"index": 0, "finish_reason": behaviour.finish, "message": message}
        return web.json_response(
            {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 20}}
        )


@asynccontextmanager
async def fake_endpoint(script: Script) -> AsyncIterator[FakeEndpoint]:
    fake = FakeEndpoint(script)
    application = web.Application(client_max_size=64 << 20)
    application.router.add_post("/v1/chat/completions", fake.answer)
    async with serving(application) as root:
        fake.url = f"{root}/v1"
        yield fake


@dataclass
class TalkingVllm(FakeVllm):
    """A vLLM that answers with text, in the tokens of ``chat``; the first stop token ends it."""

    script: Script = lambda _: Say("")
    chat: Any = None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        behaviour = self.script(self.chat.decode(body["token_ids"]))
        if not isinstance(behaviour, Say):
            return await odd(request, behaviour)
        stop = self.chat.stop_token_ids[0]
        tokens = [*self.chat.encode(behaviour.text), stop][: body["sampling_params"]["max_tokens"]]
        choice = {
            "index": 0,
            "finish_reason": "stop" if tokens[-1:] == [stop] else "length",
            "token_ids": tokens,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
            "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]},
        }
        return web.json_response({"choices": [choice], "prompt_logprobs": None})


@asynccontextmanager
async def talking_vllm(script: Script, chat: Any, *, version: str = "default") -> AsyncIterator[TalkingVllm]:
    fake = TalkingVllm(script=script, chat=chat, version=version)
    async with serving(fake.application()) as root:
        fake.url = root
        yield fake


@asynccontextmanager
async def serving(application: web.Application) -> AsyncIterator[str]:
    """Serve on a free loopback port; yield the URL."""
    runner = web.AppRunner(application, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
