"""The HTTP client of one vLLM server.

One aiohttp session may serve many clients. vLLM closes idle connections after about five seconds, so a
request that meets a dropped connection is sent once more on a new one. That is safe: a completion that did
not arrive was not used.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import anyio
import anyio.to_thread

from engine.config import SamplingConfig
from engine.inference import vllm_schema
from engine.inference.adapters import run_of, version_of
from engine.inference.completion import (
    Completion,
    InferenceError,
    ServerGone,
    ServerRefused,
    ServerStuck,
)

CONTROL_SECONDS = 60.0
_KEEPALIVE_SECONDS = 3.0  # below uvicorn's 5, so that we close first
_CONNECT_SECONDS = 10.0
_HEALTH_SECONDS = 5.0
_POLL_SECONDS = 0.1
_HEADERS = {"Content-Type": "application/json"}
_LONGEST_ANSWER = 1 << 30  # whole-vocabulary log-probs of a handshake are the longest by far
_DROPPED = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
_ATTEMPTS = 2
_GENERATE = "/inference/v1/generate"
_SCORED_AT_ONCE = 16
_UNKNOWN = "HTTP 404"


def open_session() -> aiohttp.ClientSession:
    """Return a session without a connection limit (the pool's caps bound it) and without proxies."""
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=_KEEPALIVE_SECONDS, enable_cleanup_closed=False
    )
    return aiohttp.ClientSession(connector=connector, trust_env=False, headers=_HEADERS)


class VllmClient:
    """The client of one server; ``url`` is its root, such as ``http://127.0.0.1:8000``.

    ``adapter`` is the name of the LoRA adapter that samples and scores its requests, "" for the model itself.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, *, adapter: str = "") -> None:
        self.url, self.adapter = url.rstrip("/"), adapter
        self._session = session

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        *,
        deadline: float,
        stop_token_ids: Sequence[int] = (),
        salt: str | None = None,
        experts_from: int | None = None,
    ) -> Completion:
        """Sample one continuation of ``prompt``. ``deadline`` is in seconds from now.

        With the experts of all tokens from ``experts_from`` on (None: without any).

        Raises ServerGone, ServerStuck or ServerRefused.
        """
        adapter = self.adapter
        body = vllm_schema.generate_body(
            prompt,
            sampling,
            stop_token_ids=stop_token_ids,
            salt=salt,
            adapter=adapter,
            experts_from=experts_from,
        )
        try:
            payload = await self._post(_GENERATE, deadline, body)
        except ServerRefused as error:
            if adapter and _UNKNOWN in error.what:
                # The adapter was unloaded meanwhile, or the server restarted: not the request's own fault.
                raise ServerGone(f"it does not know the adapter {adapter}", where=self.url) from error
            raise
        return vllm_schema.completion(
            payload,
            self.url,
            longest=sampling.max_tokens,
            adapter=adapter,
            experts_of=None if experts_from is None else len(prompt) - experts_from,
        )

    async def prompt_logprobs(self, tokens: Sequence[int], *, deadline: float) -> list[float]:
        """Return the log-probs of ``tokens[1:]`` given their prefixes, at temperature 1 (len - 1,).

        Raises ServerGone, ServerStuck or ServerRefused.
        """
        rows = await self.prompt_distribution(tokens, count=0, deadline=deadline)
        try:
            return [row[token] for row, token in zip(rows, tokens[1:], strict=True)]
        except (KeyError, ValueError) as error:
            raise ServerGone("its prompt log-probs are those of other tokens", where=self.url) from error

    async def prompt_distribution(
        self, tokens: Sequence[int], *, count: int, deadline: float
    ) -> list[dict[int, float]]:
        """Return the log-probs of each of ``tokens[1:]`` and of the ``count`` likeliest tokens (-1: all)."""
        if self.adapter:
            return await self._token_by_token(tokens, whole=count == -1, deadline=deadline)
        body = vllm_schema.prompt_logprobs_body(tokens, count)
        payload = await self._post(_GENERATE, deadline, body)
        if count:  # whole vocabularies are tens of megabytes
            return await anyio.to_thread.run_sync(vllm_schema.prompt_logprobs, payload, self.url)
        return vllm_schema.prompt_logprobs(payload, self.url)

    async def _token_by_token(
        self, tokens: Sequence[int], *, whole: bool, deadline: float
    ) -> list[dict[int, float]]:
        """Score a prompt by one request per prefix: vLLM on CPU dies of prompt log-probs with an adapter.

        A cache salt of its own keeps earlier computations out of it.
        """
        rows: list[dict[int, float]] = [{} for _ in tokens[1:]]
        adapter, salt = self.adapter, uuid.uuid4().hex
        places = anyio.CapacityLimiter(_SCORED_AT_ONCE)

        faults: list[InferenceError] = []

        async def score(place: int) -> None:
            body = vllm_schema.next_logprobs_body(
                tokens[: place + 1], tokens[place + 1], whole=whole, salt=salt, adapter=adapter
            )
            try:
                async with places:
                    payload = await self._post(_GENERATE, deadline, body)
                rows[place] = vllm_schema.next_logprobs(payload, self.url)
            except InferenceError as error:
                faults.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for place in range(len(rows)):
                tasks.start_soon(score, place)
        if faults:
            raise faults[0]
        return rows

    async def probe(self, *, deadline: float) -> int:
        """Sample one token, which proves that the engine makes progress, and return its version."""
        completion = await self.generate([0], SamplingConfig(max_tokens=1), deadline=deadline)
        return completion.spans[-1].version

    async def healthy(self, *, deadline: float) -> bool:
        """Return whether the HTTP server answers and its engine process lives."""
        try:
            await self.health(deadline=deadline)
        except InferenceError:
            return False
        return True

    async def health(self, *, deadline: float) -> None:
        """Check that the server is healthy.

        Raises ServerGone, ServerStuck, or ServerRefused where the answer is no vLLM server's.
        """
        await self._get("/health", deadline)

    async def until_healthy(self, *, seconds: float, alive: Callable[[], bool] = lambda: True) -> bool:
        """Poll the health; return False when ``seconds`` have passed or ``alive`` returns False."""
        with anyio.move_on_after(seconds):
            while alive():
                if await self.healthy(deadline=_HEALTH_SECONDS):
                    return True
                await anyio.sleep(_POLL_SECONDS)
        return False

    async def version(self, *, deadline: float = CONTROL_SECONDS) -> int:
        """Return the version label of the weights, UNLABELLED before the first push.

        With an adapter: its version while the server has it, else UNLABELLED.
        """
        if self.adapter:
            known = self.adapter in await self.adapters(deadline=deadline)
            return version_of(self.adapter) if known else vllm_schema.UNLABELLED
        answer = await self._table("/weight_info", deadline)
        return vllm_schema.version(str(answer.get("weight_version", "")))

    async def checksums(self, *, deadline: float) -> dict[str, str]:
        """Return the checksums of all tensors of all engines' workers: ``dp0:pp0:pcp0:tp0:NAME`` -> SHA-256.

        Raises ServerRefused where the server has no such route.
        """
        payload = await self._post("/weight_checker", deadline, {"action": "checksum"})
        answer = vllm_schema.table(payload, self.url)
        found = answer.get("checksums")
        return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}

    async def paused(self, *, deadline: float = CONTROL_SECONDS) -> bool:
        """Return whether generation is paused."""
        return bool((await self._table("/is_paused", deadline)).get("is_paused"))

    async def model(self, *, deadline: float = CONTROL_SECONDS) -> tuple[str, int]:
        """Return the model's directory and its context length in tokens, "" and 0 where unknown."""
        try:
            models = (await self._table("/v1/models", deadline)).get("data")
        except ServerRefused:
            return "", 0
        for one in models if isinstance(models, list) else ():
            if isinstance(one, dict) and isinstance(one.get("max_model_len"), int):
                return str(one.get("root") or ""), one["max_model_len"]
        return "", 0

    async def pause(self, *, clear_cache: bool, deadline: float = CONTROL_SECONDS) -> None:
        """Stop scheduling, keep the requests.

        ``clear_cache`` drops their KV and the prefix cache: they are prefilled again with the weights that
        are there when they resume.
        """
        flag = "true" if clear_cache else "false"
        await self._post(f"/pause?mode=keep&clear_cache={flag}", deadline)

    async def resume(self) -> None:
        """Schedule again."""
        await self._post("/resume", CONTROL_SECONDS)

    async def start_update(self) -> None:
        """Open a weight-update session."""
        await self._post("/start_weight_update", CONTROL_SECONDS)

    async def update_weights(self, info: dict[str, object], *, deadline: float) -> None:
        """Hand the transfer engine its description of the new weights and wait until they are loaded."""
        await self._post("/update_weights", deadline, {"update_info": info})

    async def finish_update(self, version: int | None, *, deadline: float = CONTROL_SECONDS) -> None:
        """Close the session; ``version`` becomes the label of every token sampled from now on."""
        label = None if version is None else str(version)
        await self._post("/finish_weight_update", deadline, {"weight_version": label})

    async def adapters(self, *, deadline: float = CONTROL_SECONDS) -> dict[str, str]:
        """Return the loaded adapters of spade and their directories, in the order of their loads."""
        models = (await self._table("/v1/models", deadline)).get("data")
        found = [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
        return {str(one["id"]): str(one.get("root")) for one in found if run_of(str(one.get("id")))}

    async def load_adapter(self, name: str, directory: str, *, deadline: float) -> None:
        """Load an adapter in PEFT's format from a directory that the server can read."""
        body = {"lora_name": name, "lora_path": directory}
        await self._post("/v1/load_lora_adapter", deadline, body)

    async def unload_adapter(self, name: str, *, deadline: float = CONTROL_SECONDS) -> None:
        """Unload an adapter; requests in flight that named it continue with it."""
        await self._post("/v1/unload_lora_adapter", deadline, {"lora_name": name})

    async def metrics(self, *, deadline: float) -> str:
        """Return the Prometheus text (without engine series when its statistics are disabled)."""
        return (await self._get("/metrics", deadline)).decode(errors="replace")

    async def _table(self, path: str, deadline: float) -> dict[str, Any]:
        return vllm_schema.table(await self._get(path, deadline), self.url)

    async def _get(self, path: str, deadline: float) -> bytes:
        return await self._request("GET", path, b"", deadline)

    async def _post(self, path: str, deadline: float, body: object = None) -> bytes:
        encoded = body if isinstance(body, bytes) else vllm_schema.encode(body) if body else b""
        return await self._request("POST", path, encoded, deadline)

    async def _request(self, method: str, path: str, body: bytes, deadline: float) -> bytes:
        end = anyio.current_time() + deadline
        what = path.partition("?")[0].rpartition("/")[2]
        for attempt in range(1, _ATTEMPTS + 1):
            left = max(0.001, end - anyio.current_time())
            timeout = aiohttp.ClientTimeout(total=left, sock_connect=min(left, _CONNECT_SECONDS))
            try:
                async with self._session.request(
                    method, self.url + path, data=body or None, timeout=timeout
                ) as response:
                    payload = await _read(response, self.url)
                    if response.status != 200:
                        raise _refusal(response.status, payload, what, self.url)
                    return payload
            except _DROPPED as error:
                refused = isinstance(error, aiohttp.ClientConnectorError)
                if refused or attempt == _ATTEMPTS:
                    raise ServerGone(f"{what}: {error or type(error).__name__}", where=self.url) from error
            except aiohttp.ConnectionTimeoutError as error:
                raise ServerGone(f"{what}: no connection", where=self.url) from error
            except TimeoutError as error:
                raise ServerStuck(f"{what}: no answer in {deadline:.1f} s", where=self.url) from error
            except aiohttp.ClientError as error:
                raise ServerGone(f"{what}: {error!r}", where=self.url) from error
        raise AssertionError("unreachable")


async def _read(response: aiohttp.ClientResponse, where: str) -> bytes:
    """Return the body. Raises ServerGone beyond 1 GiB, so a faulty server cannot exhaust the memory."""
    chunks: list[bytes] = []
    left = _LONGEST_ANSWER
    async for chunk in response.content.iter_any():
        left -= len(chunk)
        if left < 0:
            raise ServerGone(f"its answer is longer than {_LONGEST_ANSWER >> 20} MiB", where=where)
        chunks.append(chunk)
    return b"".join(chunks)


def _refusal(status: int, payload: bytes, what: str, where: str) -> InferenceError:
    text = " ".join(payload[:1000].decode(errors="replace").split())
    kind = ServerGone if status >= 500 else ServerRefused
    return kind(f"{what}: HTTP {status}: {text}", where=where)
