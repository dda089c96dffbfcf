"""A stand-in for one vLLM server: the routes we use, over real HTTP, with faults to order."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
from aiohttp import web

from bus.messages import PolicyPublished

STOP = 2
CANARY = (3, 4, 5, 6)


def logprob(token: int, version: str) -> float:
    """The fake policy: any label changes every log-prob."""
    return -0.01 * token - (0.5 * int(version) if version.isdecimal() else 0.25)


@dataclass
class FakeVllm:
    """``hold`` blocks generation while cleared; ``faults`` maps a path to what it does next, in order:
    an HTTP status, ``drop`` (close the connection) or ``hang``. ``stale_loads`` is how many loads do
    nothing but change the label; ``sampled_shift`` falsifies the log-probs of sampled tokens. ``held`` is
    what its worker says to hold, ``rotten`` is why its next proofs fail ("" for one that does not), ``infos``
    are the pushes."""

    url: str = ""
    version: str = "default"
    loaded: str = "default"
    pending: dict[str, Any] | None = None
    paused: bool = False
    session_open: bool = False
    healthy: bool = True
    refuse_reason: str = ""
    held: str = ""
    wanted: str = ""
    reason: str = ""
    rotten: list[str] = field(default_factory=list)
    infos: list[dict[str, Any]] = field(default_factory=list)
    joined: list[dict[str, Any]] = field(default_factory=list)
    stale_loads: int = 0
    sampled_shift: float = 0.0
    tokens: int = 4
    metrics: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    most_running: int = 0

    def __post_init__(self) -> None:
        self.hold.set()
        self.awake.set()

    def application(self) -> web.Application:
        application = web.Application(client_max_size=64 << 20)
        for method, path, handler in (
            ("GET", "/health", self._health),
            ("GET", "/weight_info", self._weight_info),
            ("GET", "/is_paused", self._is_paused),
            ("GET", "/metrics", self._metrics),
            ("POST", "/inference/v1/generate", self._generate),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("POST", "/start_weight_update", self._start),
            ("POST", "/update_weights", self._update),
            ("POST", "/finish_weight_update", self._finish),
            ("POST", "/collective_rpc", self._state),
            ("POST", "/init_weight_transfer_engine", self._join),
            ("POST", "/shutdown_weight_transfer_engine", self._leave),
        ):
            application.router.add_route(method, path, self._guarded(path, handler))
        return application

    def _guarded(self, path: str, handler: Any) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.calls[path] += 1
            self.order.append(path.removeprefix("/"))
            faults = self.faults.get(path)
            fault = faults.pop(0) if faults else None
            if fault == "drop":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if fault == "hang":
                await asyncio.Event().wait()
            if isinstance(fault, int):
                return _error(fault, "ordered by the test")
            return await handler(request)  # type: ignore[no-any-return]

        return handle

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "keep"
        self.paused = True
        self.awake.clear()
        self.bodies.append({"clear_cache": request.query["clear_cache"]})
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.paused = False
        self.awake.set()
        return web.json_response({"status": "resumed"})

    async def _start(self, _: web.Request) -> web.Response:
        if self.session_open:
            return _error(500, "start_weight_update called while a weight update is already active.")
        self.session_open = True
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        if not self.session_open:
            return _error(500, "start_weight_update must be called before update_weights.")
        if self.refuse_reason:
            self.session_open = False
            return _error(500, f"spade_file refuses the push: {self.refuse_reason}")
        self.infos.append(info)
        if "check_only" not in info:  # it comes from the learner's device
            assert self.paused
            self.pending = info
        elif info["check_only"]:
            self.wanted = info["sha256"]
            self.reason = self.rotten.pop(0) if self.rotten else ""
        else:
            assert self.paused
            self.pending = info
        return web.json_response({})

    async def _state(self, request: web.Request) -> web.Response:
        """Answer for the workers' extension: one worker, which has proved what it was asked to."""
        assert (await request.json())["method"] == "spade_weights_state"
        status = "refused" if self.reason else "ready" if self.wanted else "idle"
        state = {"held": self.held, "wanted": self.wanted, "status": status, "reason": self.reason}
        return web.json_response({"results": [json.dumps(state)]})

    async def _join(self, request: web.Request) -> web.Response:
        self.joined.append((await request.json())["init_info"])
        return web.json_response({})

    async def _leave(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        label = (await request.json())["weight_version"]
        if not self.session_open:
            return _error(500, "finish_weight_update called without a matching start_weight_update.")
        self.session_open = False
        if label is not None:
            assert self.pending is not None
            self.version = label
            if self.stale_loads:
                self.stale_loads -= 1
            else:
                self.loaded = label
        self.pending = None
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.hold.wait()
            await self.awake.wait()
        finally:
            self.running -= 1
        parameters = body["sampling_params"]
        answer: dict[str, Any] = {"prompt_logprobs": None}
        count = min(self.tokens, parameters["max_tokens"])
        tokens = [10 + index for index in range(count)]
        finish = "length"
        if parameters.get("stop_token_ids") and count < parameters["max_tokens"]:
            tokens[-1], finish = parameters["stop_token_ids"][0], "stop"
        if parameters.get("prompt_logprobs") is not None:
            answer["prompt_logprobs"] = [None] + [
                {str(token): {"logprob": logprob(token, self.loaded)}} for token in body["token_ids"][1:]
            ]
        content = [
            {"token_id": token, "logprob": logprob(token, self.loaded) + self.sampled_shift}
            for token in tokens
        ]
        answer["choices"] = [
            {
                "index": 0,
                "finish_reason": finish,
                "token_ids": tokens,
                "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
                "logprobs": {"content": content},
            }
        ]
        return web.json_response(answer)


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what nobody announces, such as a count in a fake; TimeoutError after ``seconds``."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - there is no event behind the condition
            await anyio.sleep(0.005)


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, text=json.dumps({"error": {"message": message}}))


@asynccontextmanager
async def fake_vllm(**settings: Any) -> AsyncIterator[FakeVllm]:
    """Run a fake on a free loopback port."""
    fake = FakeVllm(**settings)
    runner = web.AppRunner(fake.application(), shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    try:
        yield fake
    finally:
        fake.hold.set()
        fake.awake.set()
        await runner.cleanup()


def policy(version: int, *, step: int | None = None, canary_version: int | None = None) -> PolicyPublished:
    """An announcement whose canary holds on a fake that serves ``version``."""
    judged = str(version if canary_version is None else canary_version)
    return PolicyPublished(
        version=version,
        step=version if step is None else step,
        uri=f"file:///weights/{version}",
        sha256="0" * 64,
        size=1,
        canary_tokens=np.asarray(CANARY, "<i4").tobytes(),
        canary_logprobs=np.asarray([logprob(token, judged) for token in CANARY[1:]], "<f4").tobytes(),
    )
