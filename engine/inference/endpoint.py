"""An OpenAI-compatible endpoint as a writer of text: retries, a rate limit, counts of tokens and cost.

For models that are not trained here: a frontier model as designer, or as writer of hints. Only
``/chat/completions`` is used, so any server that speaks it will do.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import anyio
import msgspec
import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from engine.config import Endpoint as Settings
from engine.config import Sampling
from engine.errors import ConfigError, SpadeError
from engine.inference.completion import InferenceError, InferenceUnavailable

LARGEST_ANSWER = 16 << 20
"""Bytes of an answer; a longer one is a fault of the endpoint."""

_CONNECT_SECONDS = 10.0
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 60.0
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_OURS = {
    401: "Set the environment variable that `key_env` names to a valid key.",
    402: "The account behind the key has no credit left.",
    403: "The key may not use this model.",
    404: "Check `base_url` (it ends where /chat/completions begins) and `model`.",
}

log = structlog.get_logger("spade.endpoint")


class EndpointRefused(InferenceError):
    """The endpoint will not answer this request, however often it is asked."""


class EndpointMisused(SpadeError):
    """The recipe's endpoint, model or key is wrong: no request will be answered."""


class _Busy(InferenceError):
    """Worth another try. ``after`` is the delay in seconds that the endpoint asked for, 0 without one."""

    def __init__(self, what: str, *, after: float = 0.0) -> None:
        super().__init__(what)
        self.after = after


@dataclass(frozen=True)
class Answer:
    """What the endpoint wrote, why it ended, and the tokens it counted (0 where it says nothing)."""

    text: str
    finish: Literal["stop", "length"]
    tokens_in: int = 0
    tokens_out: int = 0


class _Said(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    message: _Said | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Body)


class Pace:
    """At most ``per_minute`` starts a minute, evenly spaced; 0 sets no limit."""

    def __init__(self, per_minute: float) -> None:
        self._gap = 60.0 / per_minute if per_minute > 0 else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        """Return when the next request may start."""
        if not self._gap:
            return
        now = anyio.current_time()
        start = max(now, self._next)
        self._next = start + self._gap
        await anyio.sleep(start - now)


class Endpoint:
    """One endpoint; safe to share between tasks. Use :func:`open_endpoint`."""

    def __init__(self, settings: Settings, key: str, session: aiohttp.ClientSession) -> None:
        self._settings, self._session = settings, session
        self._url = settings.base_url.rstrip("/") + "/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._pace = Pace(settings.requests_per_minute)
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    async def write(
        self, turns: Sequence[str], *, sampling: Sampling, system: str | None = None, seed: int | None = None
    ) -> Answer:
        """Continue a conversation; ``turns`` are what the user and the model said in turn, the user last.

        Raises InferenceUnavailable when ``tries`` requests failed, EndpointRefused when it answered that it
        will not do this one, EndpointMisused when it will not do any.
        """
        body = msgspec.json.encode(self._body(turns, sampling, system, seed))
        retrying = AsyncRetrying(
            sleep=anyio.sleep,
            stop=stop_after_attempt(self._settings.tries),
            wait=_delay,
            retry=retry_if_exception_type(_Busy),
            before_sleep=self._note_retry,
            reraise=True,
        )
        try:
            answer: Answer = await retrying(self._ask, body)
        except _Busy as error:
            self._counts["failed"] += 1
            tries = f"{self._settings.tries} requests failed, the last one: {error.what}"
            raise InferenceUnavailable(tries, where=self._url) from error
        self._counts["answers"] += 1
        self._counts["tokens_in"] += answer.tokens_in
        self._counts["tokens_out"] += answer.tokens_out
        return answer

    def statistics(self) -> dict[str, float]:
        """Counts of requests, retries, failures and tokens; ``cost`` in the currency of the prices."""
        settings, counts = self._settings, self._counts
        cost = counts["tokens_in"] * settings.price_in + counts["tokens_out"] * settings.price_out
        seconds = self._seconds / counts["requests"] if counts["requests"] else 0.0
        return {"cost": cost / 1e6, "mean_seconds": seconds, **counts}

    def _note_retry(self, state: RetryCallState) -> None:
        self._counts["retries"] += 1
        why = state.outcome.exception() if state.outcome else None
        log.info("endpoint_asked_again", url=self._url, attempt=state.attempt_number, why=str(why))

    def _body(
        self, turns: Sequence[str], sampling: Sampling, system: str | None, seed: int | None
    ) -> dict[str, Any]:
        roles = ("user", "assistant")
        messages = [{"role": roles[turn % 2], "content": text} for turn, text in enumerate(turns)]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        settings = self._settings
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": messages,
            settings.tokens_field: sampling.max_tokens,
        }
        if settings.send_sampling:
            body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if settings.send_seed and seed is not None:
            body["seed"] = seed
        return body | settings.extra

    async def _ask(self, body: bytes) -> Answer:
        await self._pace.turn()
        seconds = self._settings.request_seconds
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, _CONNECT_SECONDS))
        self._counts["requests"] += 1
        started = time.perf_counter()
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as response:
                payload = await _read(response)
                if response.status != 200:
                    raise self._fault(response, payload)
                return self._answer(payload)
        except TimeoutError as error:
            raise _Busy(f"no answer in {seconds:g} s") from error
        except aiohttp.ClientError as error:
            raise _Busy(f"the connection failed: {error or type(error).__name__}") from error
        finally:
            self._seconds += time.perf_counter() - started

    def _fault(self, response: aiohttp.ClientResponse, payload: bytes) -> SpadeError:
        status = response.status
        text = " ".join(payload[:500].decode(errors="replace").split())
        self._counts[f"http_{status}"] += 1
        if status in _AGAIN or status >= 500:
            return _Busy(f"HTTP {status}: {text}", after=_asked_delay(response.headers.get("Retry-After")))
        if status in _OURS:
            return EndpointMisused(
                f"the endpoint answered HTTP {status}: {text}", where=self._url, remedy=_OURS[status]
            )
        return EndpointRefused(f"HTTP {status}: {text}", where=self._url)

    def _answer(self, payload: bytes) -> Answer:
        try:
            body = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            self._counts["unreadable"] += 1
            raise _Busy(f"unreadable answer: {error}: {payload[:120]!r}") from error
        if not body.choices or (said := body.choices[0].message) is None:
            self._counts["unreadable"] += 1
            raise _Busy("the answer has no message")
        usage = body.usage or _Usage()
        return Answer(
            text=said.content or said.refusal or "",
            finish="length" if body.choices[0].finish_reason == "length" else "stop",
            tokens_in=usage.prompt_tokens,
            tokens_out=usage.completion_tokens,
        )


@asynccontextmanager
async def open_endpoint(settings: Settings) -> AsyncIterator[Endpoint]:
    """Yield the endpoint of ``settings`` with a session of its own. Raises ConfigError without its key."""
    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, trust_env=True) as session:
        yield Endpoint(settings, key_of(settings), session)


def key_of(settings: Settings) -> str:
    """Return the key that ``key_env`` names, "" when it names none. Raises ConfigError when it is not set."""
    if not settings.key_env:
        return ""
    key = os.environ.get(settings.key_env, "").strip()
    if key:
        return key
    raise ConfigError(
        f"The environment variable {settings.key_env} is not set, and the recipe takes the key of the "
        f"endpoint {settings.base_url} from it.",
        remedy=f'export {settings.key_env}=...; or set key_env = "" for an endpoint without a key.',
    )


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the body. Raises _Busy when it is longer than any answer."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        size += len(chunk)
        if size > LARGEST_ANSWER:
            raise _Busy(f"the answer is longer than {LARGEST_ANSWER >> 20} MiB")
    return b"".join(chunks)


def _asked_delay(header: str | None) -> float:
    """Return the seconds of a Retry-After header; a date or nonsense asks for nothing."""
    try:
        return min(max(float(header or 0), 0.0), _LONGEST_DELAY)
    except ValueError:
        return 0.0


def _delay(state: RetryCallState) -> float:
    """Return the seconds before the next try: exponential with jitter, at least what was asked for."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.after if isinstance(error, _Busy) else 0.0
    grown = float(min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (state.attempt_number - 1)))
    return max(asked, grown * random.uniform(0.5, 1.0))
