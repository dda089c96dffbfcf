"""An OpenAI-compatible endpoint as a writer of text: retries, a rate limit, a limit on what it may cost.

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
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import aiohttp
import anyio
import msgspec
import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from engine.config import EndpointConfig as Settings
from engine.config import SamplingConfig
from engine.errors import ConfigError, SpadeError
from engine.inference.completion import InferenceError, InferenceUnavailable
from engine.inference.spending import Bill, Ledger, Purse

LARGEST_ANSWER = 16 << 20
"""Bytes of an answer; a longer one is a fault of the endpoint."""

_CONNECT_SECONDS = 10.0
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 60.0
_LONGEST_ASKED = 900.0
# More tokens than any answer has.
_MOST_TOKENS = 1 << 32
# So many refusals before any answer are no matter of what was asked.
_REFUSED_AT_FIRST = 20
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_OURS = {
    401: "Set the environment variable that `key_env` names to a valid key.",
    402: "The account behind the key has no credit left.",
    403: "The key may not use this model.",
    404: "Check `base_url` (it ends where /chat/completions begins) and `model`.",
    405: "Check `base_url` (it ends where /chat/completions begins).",
}
_MOVED = "Give the address that it names as `base_url`: redirects are not followed, for the key's sake."

log = structlog.get_logger("spade.endpoint")


class EndpointRefused(InferenceError):
    """The endpoint will not answer this request, however often it is asked: too long, filtered, declined."""


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


class _Part(msgspec.Struct):
    text: str | None = None


class _Said(msgspec.Struct):
    content: str | list[_Part] | None = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        """What was written; some endpoints write it in parts, and thoughts in parts without a text."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


class _Choice(msgspec.Struct):
    message: _Said | None = None
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice]
    usage: Any = None

    def counted(self, name: str) -> int:
        """Return a count of tokens, 0 for none or for nonsense: an answer is not thrown away for it."""
        found = self.usage.get(name) if isinstance(self.usage, dict) else None
        if not isinstance(found, int | float) or isinstance(found, bool):
            return 0
        return int(found) if 0 < found < _MOST_TOKENS else 0


_decoder = msgspec.json.Decoder(_Body)


class Pace:
    """At most ``per_minute`` starts a minute, evenly spaced; 0 sets no limit."""

    def __init__(self, per_minute: float) -> None:
        self._gap = 60.0 / per_minute if per_minute > 0 else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        """Return when the next request may start."""
        now = anyio.current_time()
        start = max(now, self._next)
        if self._gap:
            self._next = start + self._gap
        await anyio.sleep(start - now)

    def hold(self, seconds: float) -> None:
        """Let nothing start for so long: an endpoint that is busy is so for every request."""
        self._next = max(self._next, anyio.current_time() + seconds)


class Endpoint:
    """One endpoint; whoever asks it in a process shares it, with its pace and its purse. Use
    :func:`open_endpoint`.
    """

    def __init__(self, settings: Settings, key: str, session: aiohttp.ClientSession, purse: Purse) -> None:
        self._settings, self._session, self._purse = settings, session, purse
        self._url = settings.base_url.rstrip("/") + "/chat/completions"
        self._key = key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._pace = Pace(settings.requests_per_minute)
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    async def write(
        self,
        turns: Sequence[str],
        *,
        sampling: SamplingConfig,
        system: str | None = None,
        seed: int | None = None,
    ) -> Answer:
        """Continue a conversation; ``turns`` are what the user and the model said in turn, the user last.

        Raises InferenceUnavailable when ``tries`` requests failed, EndpointRefused when it answered that it
        will not do this one, EndpointMisused when it will not do any, EndpointSpent when the money is spent.
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
            answer: Answer = await retrying(self._ask, body, sampling.max_tokens)
        except EndpointRefused as error:
            self._note_refusal(error)
            raise
        except _Busy as error:
            self._counts["failed"] += 1
            tries = f"{self._settings.tries} requests failed, the last one: {error.what}"
            raise InferenceUnavailable(tries, where=self._url) from error
        self._counts["answers"] += 1
        return answer

    def statistics(self) -> dict[str, float]:
        """Counts of requests, retries, refusals, failures and tokens; money in the currency of the prices."""
        counts = self._counts
        seconds = self._seconds / counts["requests"] if counts["requests"] else 0.0
        return {"mean_seconds": seconds, **self._purse.statistics(), **counts}

    def _note_refusal(self, error: EndpointRefused) -> None:
        """Count it. Raises EndpointMisused when nothing but refusals ever came."""
        self._counts["refused"] += 1
        if not self._counts["answers"] and self._counts["refused"] >= _REFUSED_AT_FIRST:
            raise EndpointMisused(
                f"the endpoint has refused each of the first {_REFUSED_AT_FIRST} requests: {error.what}",
                where=self._url,
                remedy="Check `model`, `tokens_field`, `send_sampling`, `extra` and `context_tokens`.",
            ) from error

    def _note_retry(self, state: RetryCallState) -> None:
        self._counts["retries"] += 1
        why = state.outcome.exception() if state.outcome else None
        log.info("endpoint_asked_again", url=self._url, attempt=state.attempt_number, why=str(why))

    def _body(
        self, turns: Sequence[str], sampling: SamplingConfig, system: str | None, seed: int | None
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

    async def _ask(self, body: bytes, most_tokens: int) -> Answer:
        async with self._purse.paying(body, most_tokens) as bill:
            await self._pace.turn()
            self._counts["requests"] += 1
            started, bill.sent = time.perf_counter(), True
            try:
                return self._answer(bill, body, await self._post(bill, body))
            finally:
                self._seconds += time.perf_counter() - started

    async def _post(self, bill: Bill, body: bytes) -> bytes:
        """Return the body of an answer that is one. ``bill`` is told when none can have been charged."""
        seconds = self._settings.request_seconds
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, _CONNECT_SECONDS))
        try:
            async with self._session.post(
                self._url, data=body, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    bill.sent = False
                payload = await _read(response)
                if response.status != 200:
                    raise self._fault(response, payload)
                return payload
        except TimeoutError as error:
            raise _Busy(f"no answer in {seconds:g} s") from error
        except aiohttp.ClientConnectorError as error:
            bill.sent = False
            raise _Busy(f"the connection failed: {error}") from error
        except aiohttp.ClientError as error:
            raise _Busy(f"the connection failed: {error or type(error).__name__}") from error

    def _fault(self, response: aiohttp.ClientResponse, payload: bytes) -> SpadeError:
        status = response.status
        text = " ".join(payload[:500].decode(errors="replace").split())
        if self._key:
            text = text.replace(
                self._key, "(the key)"
            )  # reasons are facts of the run: they are kept and shown
        self._counts[f"http_{status}"] += 1
        if status in _AGAIN or status >= 500:
            after = _asked_delay(response.headers.get("Retry-After"), time.time())
            self._pace.hold(after)
            return _Busy(f"HTTP {status}: {text}", after=after)
        if status in _OURS or status < 400:
            what = f"the endpoint answered HTTP {status}: {response.headers.get('Location') or text}"
            remedy = _MOVED if 300 <= status < 400 else _OURS.get(status, _OURS[404])
            return EndpointMisused(what, where=self._url, remedy=remedy)
        return EndpointRefused(f"HTTP {status}: {text}", where=self._url)

    def _answer(self, bill: Bill, body: bytes, payload: bytes) -> Answer:
        try:
            found = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            self._counts["unreadable"] += 1
            raise _Busy(f"unreadable answer: {error}: {payload[:120]!r}") from error
        if not found.choices or (said := found.choices[0].message) is None:
            self._counts["unreadable"] += 1
            raise _Busy("the answer has no message")
        text, asked, written = said.text, found.counted("prompt_tokens"), found.counted("completion_tokens")
        self._purse.count(bill, body, text, (asked, written))
        self._counts["tokens_in"] += asked
        self._counts["tokens_out"] += written
        if found.choices[0].finish_reason == "content_filter":
            raise EndpointRefused("its content filter stopped the answer", where=self._url)
        if said.refusal and not text:
            raise EndpointRefused(f"it declined: {said.refusal[:500]}", where=self._url)
        return Answer(
            text=text,
            finish="length" if found.choices[0].finish_reason == "length" else "stop",
            tokens_in=asked,
            tokens_out=written,
        )


@asynccontextmanager
async def open_endpoint(settings: Settings, ledger: Ledger | None = None) -> AsyncIterator[Endpoint]:
    """Yield the endpoint of ``settings`` with a session of its own. ``ledger`` keeps what its answers cost,
    for ``max_cost``; None: only this process counts. Raises ConfigError without its key.
    """
    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, trust_env=True) as session:
        yield Endpoint(settings, key_of(settings), session, Purse(settings, ledger))


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


def _asked_delay(header: str | None, now: float) -> float:
    """Return the seconds of a Retry-After header, a number or a date; 0 for nonsense. ``now`` in seconds."""
    try:
        asked = float(header or 0)
    except ValueError:
        try:
            asked = parsedate_to_datetime(header or "").timestamp() - now
        except ValueError:
            return 0.0
    return min(asked, _LONGEST_ASKED) if asked > 0 else 0.0


def _delay(state: RetryCallState) -> float:
    """Return the seconds before the next try: exponential with jitter, at least what was asked for."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.after if isinstance(error, _Busy) else 0.0
    grown = float(min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (state.attempt_number - 1)))
    return max(asked, grown * random.uniform(0.5, 1.0))
