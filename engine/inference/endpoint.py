"""An OpenAI-compatible endpoint as a writer of text: retries, a rate limit, a budget.

For models that are not trained here: a frontier model as designer, or as writer of hints. The ``openai``
client sends the requests; only ``/chat/completions`` is used, so any server with that route will do. Gateways
report faults in answers with status 200 too, so an answer counts only when it says that it is whole, or cut
for length.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal

import anyio
import msgspec
import structlog

from engine.config import EndpointConfig, SamplingConfig
from engine.errors import ConfigError, SpadeError
from engine.inference.completion import InferenceError, InferenceUnavailable
from engine.inference.spending import Add, Charge, EndpointBudget

if TYPE_CHECKING:
    import openai

LARGEST_ANSWER = 16 << 20
"""Bytes of an answer; a longer one is a fault of the endpoint."""

_CONNECT_SECONDS = 10.0
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 60.0
_LONGEST_ASKED = 900.0
_MOST_TOKENS = 1 << 32  # more than any answer has
# This many refusals before any answer mean that the prompts are not the cause.
_REFUSED_AT_FIRST = 20

# Finish reasons, by their names at the known providers. Every other one, and none at all, is a fault.
_WHOLE = {"stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete", "completed"}
_CUT = {"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"}
_FILTERED = {"content_filter", "content_filtered", "safety", "sensitive", "refusal", "recitation"}
_FILTERED |= {"blocklist", "prohibited_content", "spii", "guardrail_intervened"}

_AGAIN = frozenset({408, 409, 425, 429})
# Statuses for error objects that name none.
_NAMED = {
    "rate_limit": 429,
    "resource_exhausted": 429,
    "overloaded": 529,
    "insufficient_quota": 402,
    "insufficient_credits": 402,
    "invalid_api_key": 401,
    "authentication": 401,
    "permission": 403,
    "not_found": 404,
    "context_length": 400,
    "invalid_request": 400,
    "content_filter": 400,
}
_UNNAMED = 502
_REMEDIES = {
    401: "Set the environment variable that `key_env` names to a valid key.",
    402: "The account behind the key has no credit left.",
    403: "The key may not use this model.",
    404: "Check `base_url` (it ends where /chat/completions begins) and `model`.",
    405: "Check `base_url` (it ends where /chat/completions begins).",
}
_MOVED = (
    "Give the address that it names as `base_url`: redirects are not followed, since they would get the key."
)

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
class EndpointReply:
    """A whole or cut text, and the tokens that the endpoint counted (0 where it does not say)."""

    text: str
    finish: Literal["stop", "length"]
    tokens_in: int = 0
    tokens_out: int = 0


class _Part(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        """The text; some endpoints send it in parts, and thoughts in parts without a text."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


class _ChatChoice(msgspec.Struct):
    message: _Message | None = None
    finish_reason: str | None = None
    error: Any = None


class _ChatBody(msgspec.Struct):
    choices: list[_ChatChoice] | None = None
    usage: Any = None
    error: Any = None

    def counted(self, name: str) -> int:
        """Return a count of tokens, 0 for a missing or impossible one: the answer is kept all the same."""
        found = self.usage.get(name) if isinstance(self.usage, dict) else None
        if not isinstance(found, int | float) or isinstance(found, bool):
            return 0
        return int(found) if 0 < found < _MOST_TOKENS else 0


_decoder = msgspec.json.Decoder(_ChatBody)


class Pace:
    """At most ``per_minute`` starts per minute, evenly spaced; 0 sets no limit."""

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
        """Start nothing for ``seconds``: an endpoint that is busy is busy for every request."""
        self._next = max(self._next, anyio.current_time() + seconds)


class Endpoint:
    """One endpoint, shared by all its users in a process: one pace, one budget. Use :func:`open_endpoint`."""

    def __init__(
        self, settings: EndpointConfig, key: str, client: openai.AsyncOpenAI, budget: EndpointBudget
    ) -> None:
        self._settings, self._client, self._budget = settings, client, budget
        self._url = settings.base_url.rstrip("/") + "/chat/completions"
        self._key = key
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
    ) -> EndpointReply:
        """Continue a conversation; ``turns`` are the texts of user and model in turn, the user last.

        Raises InferenceUnavailable when ``tries`` requests failed, EndpointRefused when the endpoint refuses
        this request, EndpointMisused when it refuses all, EndpointSpent when the budget is spent.
        """
        body = self._body(turns, sampling, system, seed)
        tries = self._settings.tries
        for attempt in range(1, tries + 1):
            try:
                reply = await self._ask(body, sampling.max_tokens)
            except EndpointRefused as error:
                self._note_refusal(error)
                raise
            except _Busy as error:
                if attempt == tries:
                    self._counts["failed"] += 1
                    what = f"{tries} requests failed, the last one: {error.what}"
                    raise InferenceUnavailable(what, where=self._url) from error
                self._counts["retries"] += 1
                log.info("endpoint_asked_again", url=self._url, attempt=attempt, why=error.what)
                grown = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (attempt - 1))
                await anyio.sleep(max(error.after, grown * random.uniform(0.5, 1.0)))
            else:
                self._counts["answers"] += 1
                return reply
        raise AssertionError("unreachable")

    def statistics(self) -> dict[str, float]:
        """Return counts of requests, retries, refusals, failures, tokens, and money."""
        counts = self._counts
        seconds = self._seconds / counts["requests"] if counts["requests"] else 0.0
        return {"mean_seconds": seconds, **self._budget.statistics(), **counts}

    def _note_refusal(self, error: EndpointRefused) -> None:
        """Count it. Raises EndpointMisused when no request was ever answered."""
        self._counts["refused"] += 1
        if not self._counts["answers"] and self._counts["refused"] >= _REFUSED_AT_FIRST:
            raise EndpointMisused(
                f"the endpoint has refused each of the first {_REFUSED_AT_FIRST} requests: {error.what}",
                where=self._url,
                remedy="Check `model`, `tokens_field`, `send_sampling`, `extra` and `context_tokens`.",
            ) from error

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

    async def _ask(self, body: dict[str, Any], most_tokens: int) -> EndpointReply:
        encoded = msgspec.json.encode(body)
        async with self._budget.request(encoded, most_tokens) as charge:
            await self._pace.turn()
            self._counts["requests"] += 1
            started, charge.sent = time.perf_counter(), True
            try:
                return self._reply(charge, encoded, await self._post(charge, body))
            finally:
                self._seconds += time.perf_counter() - started

    async def _post(self, charge: Charge, body: dict[str, Any]) -> bytes:
        """Return the body of an answer with status 200; mark in ``charge`` that nothing can be charged."""
        import httpx2
        import openai

        seconds = self._settings.request_seconds
        # Neither a key that is not ours nor the names of another account may reach the endpoint.
        hidden = ("OpenAI-Organization", "OpenAI-Project", *(() if self._key else ("Authorization",)))
        create: Any = self._client.chat.completions.with_streaming_response.create
        try:
            with anyio.fail_after(seconds):
                async with create(
                    model=body["model"],
                    messages=body["messages"],
                    extra_body=body,
                    extra_headers=dict.fromkeys(hidden, openai.omit),
                    timeout=httpx2.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS)),
                ) as response:
                    return await _read(response)
        except openai.APIStatusError as error:
            charge.sent = False
            raise self._fault(error.status_code, error.response.text, error.response.headers) from error
        except (TimeoutError, openai.APITimeoutError) as error:
            charge.sent = not isinstance(error.__cause__, httpx2.ConnectTimeout)
            raise _Busy(f"no answer in {seconds:g} s") from error
        except (openai.APIConnectionError, httpx2.HTTPError) as error:
            cause = error.__cause__ or error
            charge.sent = not isinstance(cause, httpx2.ConnectError)
            raise _Busy(f"the connection failed: {cause or type(cause).__name__}") from error

    def _fault(self, status: int, body: str, headers: Mapping[str, str]) -> SpadeError:
        """Return the error that an HTTP status, or an error object in an answer, means."""
        text = " ".join(body[:500].split())
        if self._key:
            text = text.replace(self._key, "(the key)")  # reasons are published and stored
        self._counts[f"http_{status}"] += 1
        if status in _AGAIN or status >= 500:
            after = _asked_delay(headers.get("Retry-After"), time.time())
            self._pace.hold(after or (_FIRST_DELAY if status == 429 else 0.0))
            return _Busy(f"HTTP {status}: {text}", after=after)
        if status in _REMEDIES or status < 400:
            what = f"the endpoint answered HTTP {status}: {headers.get('Location') or text}"
            return EndpointMisused(what, where=self._url, remedy=_REMEDIES.get(status, _MOVED))
        return EndpointRefused(f"HTTP {status}: {text}", where=self._url)

    def _reply(self, charge: Charge, body: bytes, payload: bytes) -> EndpointReply:
        """Return the text of an answer with status 200. Raises the error that it reports."""
        try:
            found = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            self._counts["unreadable"] += 1
            raise _Busy(f"unreadable answer: {error}: {payload[:120]!r}") from error
        choice = found.choices[0] if found.choices else _ChatChoice()
        if choice.message is not None:
            text = choice.message.text
            asked, written = found.counted("prompt_tokens"), found.counted("completion_tokens")
            self._budget.count(charge, body, text, (asked, written))
            self._counts["tokens_in"] += asked
            self._counts["tokens_out"] += written
        if fault := found.error or choice.error:
            charge.sent = choice.message is not None
            raise self._fault(_status_of(fault), msgspec.json.encode(fault).decode(), {})
        if choice.message is None:
            self._counts["unreadable"] += 1
            raise _Busy("the answer has no message")
        finish = (choice.finish_reason or "").lower()
        if finish in _FILTERED:
            raise EndpointRefused(f"its content filter stopped the answer ({finish})", where=self._url)
        if choice.message.refusal and not text:
            raise EndpointRefused(f"it declined: {choice.message.refusal[:500]}", where=self._url)
        if finish not in _WHOLE | _CUT:
            self._counts["unfinished"] += 1
            raise _Busy(f"the answer ended with the reason {choice.finish_reason!r}: it may not be whole")
        return EndpointReply(text, "stop" if finish in _WHOLE else "length", asked, written)


@asynccontextmanager
async def open_endpoint(settings: EndpointConfig, add: Add | None = None) -> AsyncIterator[Endpoint]:
    """Yield the endpoint of ``settings``. ``add`` keeps the run's sum of costs, None: of this process only.

    Raises ConfigError without its key.
    """
    key = key_of(settings)

    import openai  # takes a second

    transport = openai.DefaultAsyncHttpxClient(follow_redirects=False)
    client = openai.AsyncOpenAI(
        base_url=settings.base_url, api_key=key or "none", max_retries=0, http_client=transport
    )
    async with client:
        yield Endpoint(settings, key, client, EndpointBudget(settings, add))


def key_of(settings: EndpointConfig) -> str:
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


async def _read(response: openai.AsyncAPIResponse[Any]) -> bytes:
    """Return the body. Raises _Busy when it is longer than LARGEST_ANSWER."""
    chunks, size = [], 0
    async for chunk in response.iter_bytes():
        chunks.append(chunk)
        size += len(chunk)
        if size > LARGEST_ANSWER:
            raise _Busy(f"the answer is longer than {LARGEST_ANSWER >> 20} MiB")
    return b"".join(chunks)


def _status_of(fault: object) -> int:
    """Return the HTTP status that an error object names by number or by word, else 502."""
    fields = fault if isinstance(fault, dict) else {"type": fault}
    for name in ("code", "status", "status_code", "http_status"):
        value = str(fields.get(name, ""))
        if value.isdecimal() and 300 <= int(value) < 600:
            return int(value)
    words = " ".join(str(fields.get(name)) for name in ("code", "status", "type")).lower().replace(" ", "_")
    return next((status for word, status in _NAMED.items() if word in words), _UNNAMED)


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
