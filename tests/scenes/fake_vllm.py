"""A stand-in for one vLLM server: the routes we use, over real HTTP, with faults to order."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from aiohttp import web
from safetensors import safe_open

from bus.messages import PolicyPublished

STOP = 2
_WEIGHTS = tempfile.TemporaryDirectory(prefix="fake-weights-")
"""The files that announced policies name."""
CANARY = (3, 4, 5, 6)


def logprob(token: int, version: str) -> float:
    """The fake policy: any label changes every log-prob."""
    return -0.01 * token - (0.5 * int(version) if version.isdecimal() else 0.25)


@dataclass
class FakeVllm:
    """A server with faults to order; its fields set what it does and record what it was asked.

    ``hold`` blocks generation while it is cleared. ``faults`` maps a path to what it does next, in order: an
    HTTP status, ``drop`` (closes the connection; ``late:S`` after S seconds), ``lost`` (does it, then drops),
    ``hang``, ``stall`` (begins an answer and stops), ``garbage`` (bytes that are no JSON), or ``load:500``
    and ``load:hang`` (a half-done load). ``refuse_reason`` refuses to begin an update. ``stale_loads`` is the
    number of loads that change only the label. ``infos`` holds the pushes.
    ``sampled_shift`` falsifies the log-probs of sampled tokens. ``pace`` is the seconds that a token takes:
    between two tokens the server may be paused and loaded. ``journal`` (url, route) may be shared. ``named``
    holds all adapters that were ever loaded; ``engines`` data-parallel engines have checksums, those numbered
    in ``stale_engines`` of the weights of the start; ``claims`` is the adapter that answers name, if any.
    With ``experts`` (layers, top-k) it returns routed experts: those of position p are all p modulo 4.
    """

    url: str = ""
    version: str = "default"
    loaded: str = "default"
    pending: dict[str, Any] | None = None
    paused: bool = False
    session_open: bool = False
    healthy: bool = True
    refuse_reason: str = ""
    infos: list[dict[str, Any]] = field(default_factory=list)
    joined: list[dict[str, Any]] = field(default_factory=list)
    stale_loads: int = 0
    engines: int = 1
    stale_engines: tuple[int, ...] = ()
    sampled_shift: float = 0.0
    tokens: int = 4
    pace: float = 0.0
    load_seconds: float = 0.0
    score_seconds: float = 0.0
    journal: list[tuple[str, str]] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    adapted: dict[str, str] = field(default_factory=dict)
    named: list[str] = field(default_factory=list)
    claims: str = ""
    experts: tuple[int, int] | None = None
    vocabulary: int = 64
    context: int = 1 << 20
    root: str = ""
    raw: bool = False
    half_loads: int = 0
    aborted: int = 0
    metrics: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[str, list[int | str]] = field(default_factory=dict)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    most_running: int = 0
    midway: int = 0

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
            ("GET", "/v1/models", self._models),
            ("POST", "/inference/v1/generate", self._generate),
            ("POST", "/weight_checker", self._checksums),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("POST", "/start_weight_update", self._start),
            ("POST", "/update_weights", self._update),
            ("POST", "/finish_weight_update", self._finish),
            ("POST", "/init_weight_transfer_engine", self._join),
            ("POST", "/shutdown_weight_transfer_engine", self._leave),
            ("POST", "/v1/load_lora_adapter", self._load_adapter),
            ("POST", "/v1/unload_lora_adapter", self._unload_adapter),
        ):
            application.router.add_route(method, path, self._guarded(path, handler))
        return application

    def _guarded(self, path: str, handler: Any) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.calls[path] += 1
            self.order.append(path.removeprefix("/"))
            self.journal.append((self.url, path.removeprefix("/")))
            faults = self.faults.get(path)
            fault = faults.pop(0) if faults else None
            if isinstance(fault, str) and fault.startswith("load:"):
                self.loaded, self.half_loads = "rubble", self.half_loads + 1
                fault = "hang" if fault == "load:hang" else int(fault.removeprefix("load:"))
            if fault == "garbage":
                return web.Response(body=b'\xff{"choices": [', content_type="application/json")
            if fault in ("stall", "stub"):
                answer = web.StreamResponse()
                answer.content_length = 1000
                await answer.prepare(request)
                await answer.write(b"{")
                if fault == "stub":
                    assert request.transport is not None
                    request.transport.close()
                    return answer
                await asyncio.Event().wait()
            if isinstance(fault, str) and fault.startswith("late:"):
                await asyncio.sleep(float(fault.removeprefix("late:")))
                fault = "drop"
            if fault == "lost":
                await handler(request)
                fault = "drop"
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

    async def _checksums(self, request: web.Request) -> web.Response:
        assert (await request.json()) == {"action": "checksum"}
        held = {
            f"dp{engine}:pp0:pcp0:tp0:layer.weight": "start" if engine in self.stale_engines else self.loaded
            for engine in range(self.engines)
        }
        shared = {key.replace("layer.weight", "norm.weight"): "the same" for key in held}
        return web.json_response({"checksums": held | shared})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.paused})

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": "policy", "root": self.root, "max_model_len": self.context}
        loaded = [{"id": name, "root": path, "parent": "policy"} for name, path in self.adapters.items()]
        return web.json_response({"data": [model, *loaded]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if self.refuse_reason or not (path / "adapter_config.json").is_file():
            return _error(400, self.refuse_reason or "no adapter there")
        self.adapters[name], self.adapted[name] = str(path), self._weights(path)
        self.named.append(name)
        return web.Response(text="Success")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        return web.Response(text="Success")

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
        self.journal.append((self.url, "resumed"))
        self.awake.set()
        return web.json_response({"status": "resumed"})

    async def _start(self, _: web.Request) -> web.Response:
        if self.refuse_reason:
            return _error(500, f"Weight transfer not configured: {self.refuse_reason}")
        if self.session_open:
            return _error(500, "start_weight_update called while a weight update is already active.")
        self.session_open = True
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        if not self.session_open:
            return _error(500, "start_weight_update must be called before update_weights.")
        self.infos.append(info)
        assert self.paused
        await asyncio.sleep(self.load_seconds)
        self.pending = info
        return web.json_response({})

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
        if (name := body.get("model", "policy")) != "policy" and name not in self.adapters:
            return _error(404, f"The model `{name}` does not exist.")
        loaded = self.adapted.get(name)
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return web.json_response(await self._sample(body, loaded))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    def _weights(self, directory: Path) -> str:
        """The label of the fake policy that an adapter stands for is its first number."""
        if self.stale_loads:
            self.stale_loads -= 1
            return "rubble"
        with safe_open(directory / "adapter_model.safetensors", framework="numpy") as file:
            return str(int(file.get_tensor(next(iter(file.keys()))).flat[0]))

    async def _sample(self, body: dict[str, Any], adapter: str | None = None) -> dict[str, Any]:
        parameters = body["sampling_params"]
        count = min(self.tokens, parameters["max_tokens"])
        stops = parameters.get("stop_token_ids") if count < parameters["max_tokens"] else None
        tokens, content, spans = [], [], []
        for index in range(count):
            self.midway += index > 0
            try:
                await asyncio.sleep(self.pace)
                await self.hold.wait()
                await self.awake.wait()
            finally:
                self.midway -= index > 0
            token = stops[0] if stops and index == count - 1 else 10 + index
            tokens.append(token)
            content.append(
                {
                    "token_id": token,
                    "logprob": self._sampled(token, parameters.get("temperature", 1.0), adapter),
                    "top_logprobs": self._candidates(token, parameters, adapter),
                }
            )
            if spans and spans[-1]["version"] == self.version:
                spans[-1]["end"] = index + 1
            else:
                spans.append({"version": self.version, "start": index, "end": index + 1})
        rows: list[dict[str, Any] | None] | None = None
        if (wanted := parameters.get("prompt_logprobs")) is not None:
            assert adapter is None, "the CPU build dies of that"
            await asyncio.sleep(self.score_seconds)
            whole = range(self.vocabulary) if wanted == -1 else ()
            rows = [None] + [
                {str(one): {"logprob": logprob(one, self.loaded)} for one in {*whole, token}}
                for token in body["token_ids"][1:]
            ]
        choice = {
            "index": 0,
            "finish_reason": "stop" if stops else "length",
            "token_ids": tokens,
            "weight_versions": spans,
            "logprobs": {"content": content},
        }
        if self.experts is not None:
            positions = range(
                parameters.get("routed_experts_prompt_start", 0), len(body["token_ids"]) + count - 1
            )
            routed = np.array([np.full(self.experts, position % 4) for position in positions], np.uint8)
            with io.BytesIO() as stream:
                np.save(stream, routed, allow_pickle=False)
                choice["routed_experts"] = base64.b64encode(stream.getvalue()).decode()
        return {"model": self.claims or body.get("model"), "prompt_logprobs": rows, "choices": [choice]}

    def _candidates(
        self, token: int, parameters: dict[str, Any], adapter: str | None
    ) -> list[dict[str, Any]]:
        """As vLLM has them: the sampled token first, of those wanted as many as ``logprobs`` says."""
        count = parameters.get("logprobs", 0)
        wanted = range(self.vocabulary) if count == -1 else parameters.get("logprob_token_ids", ())
        found = list(dict.fromkeys([token, *wanted]))
        return [
            {"token_id": one, "logprob": self._sampled(one, 1.0, adapter)}
            for one in (found if count == -1 else found[: max(count, 1)])
        ]

    def _sampled(self, token: int, temperature: float, adapter: str | None = None) -> float:
        """The log-prob that is reported: after the temperature unless ``raw``."""
        weights = self.loaded if adapter is None else adapter
        value = logprob(token, weights)
        if temperature not in (0.0, 1.0) and not self.raw:
            scaled = [logprob(one, weights) / temperature for one in range(self.vocabulary)]
            value = value / temperature - float(np.logaddexp.reduce(scaled))
        return value + self.sampled_shift


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll a condition without an event, such as a count in a fake; TimeoutError after ``seconds``."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - there is no event behind the condition
            await anyio.sleep(0.005)


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, text=json.dumps({"error": {"message": message}}))


@asynccontextmanager
async def fake_vllm(**settings: Any) -> AsyncIterator[FakeVllm]:
    """Run a fake on a free loopback port."""
    fake = FakeVllm(**settings)
    runner = web.AppRunner(
        fake.application(), shutdown_timeout=0.1, access_log=None, handler_cancellation=True
    )
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
    content, file = b"weights %d" % version, Path(_WEIGHTS.name) / str(version)
    file.write_bytes(content)
    return PolicyPublished(
        version=version,
        step=version if step is None else step,
        uri=file.as_uri(),
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
        canary_tokens=np.asarray(CANARY, "<i4").tobytes(),
        canary_logprobs=np.asarray([logprob(token, judged) for token in CANARY[1:]], "<f4").tobytes(),
    )
