"""vLLM's JSON, as typed structs: only the fields we read (vLLM 0.32, ``/inference/v1/generate``)."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bus.messages import Span
from engine.config import SamplingConfig
from engine.inference.adapters import version_of
from engine.inference.completion import Completion, Finish, ServerGone, ServerRefused


class NoExperts(ServerGone):
    """The server does not return routed experts."""


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float


class _TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_VersionSpan] | None = None
    routed_experts: str | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    model: str | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Answer)

_LONGEST_LABEL = 19  # shorter decimals fit into 63 bits

UNLABELLED = -1  # the version of tokens sampled before the first push


def generate_body(
    prompt: Sequence[int],
    sampling: SamplingConfig,
    *,
    stop_token_ids: Sequence[int],
    salt: str | None,
    adapter: str = "",
    experts_from: int | None = None,
) -> bytes:
    """Return the request for one completion with log-probs, by the model with or without an ``adapter``.

    A server that returns routed experts leaves out those of the first ``experts_from`` tokens.

    Only ``stop_token_ids`` end a completion. The model's own end-of-sequence ids are ignored unless they are
    among them, so both sides agree on the end of a turn.
    """
    parameters: dict[str, object] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    if experts_from is not None:
        parameters["routed_experts_prompt_start"] = experts_from
    body: dict[str, object] = {"token_ids": prompt, "sampling_params": parameters}
    if salt is not None:
        body["cache_salt"] = salt
    if adapter:
        body["model"] = adapter
    return _encoder.encode(body)


def next_logprobs_body(prefix: Sequence[int], token: int, *, whole: bool, salt: str, adapter: str) -> bytes:
    """Return the request for the log-prob of ``token`` after ``prefix``, or of the ``whole`` vocabulary.

    At temperature 1; one token is sampled with it. For servers that cannot score prompts with an adapter.
    """
    parameters: dict[str, object] = {"max_tokens": 1, "ignore_eos": True, "detokenize": False}
    if whole:
        parameters["logprobs"] = -1
    else:
        # As many entries come back as are asked for, the sampled token's first: one more than is wanted.
        parameters |= {"logprobs": 2, "logprob_token_ids": [token, 0 if token else 1]}
    return _encoder.encode(
        {"model": adapter, "token_ids": prefix, "cache_salt": salt, "sampling_params": parameters}
    )


def prompt_logprobs_body(tokens: Sequence[int], count: int) -> bytes:
    """Return the request for the log-probs of a prompt, which vLLM computes without its prefix cache.

    ``count`` 0 asks for the prompt's own tokens only, -1 for the whole vocabulary.
    """
    parameters = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": count, "detokenize": False}
    return _encoder.encode({"token_ids": tokens, "sampling_params": parameters})


def encode(value: object) -> bytes:
    """Return ``value`` as JSON."""
    return _encoder.encode(value)


def table(payload: bytes, where: str) -> dict[str, Any]:
    """Return a JSON object. Raises ServerGone for anything else."""
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ServerGone(f"unreadable answer: {error}: {payload[:200]!r}", where=where) from error


def completion(
    payload: bytes,
    where: str,
    *,
    longest: int | None = None,
    adapter: str = "",
    experts_of: int | None = None,
) -> Completion:
    """Parse and check an answer to ``generate_body`` of at most ``longest`` tokens.

    Tokens of an ``adapter``, which the answer must name, have the version in its name. The server's label is
    that of the weights beneath it, which must not have changed. The experts of ``experts_of`` tokens of the
    prompt were asked for, and of those that were sampled.

    Raises ServerGone when the answer is unusable (unreadable, aborted, log-probs or version spans missing or
    not fitting the tokens): another server may do better.
    """
    answer = _answer(payload, where)
    if adapter and answer.model != adapter:
        raise ServerGone(f"it sampled by {answer.model} where {adapter} was asked for", where=where)
    choice = answer.choices[0]
    tokens = choice.token_ids or []
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if [entry.token_id for entry in content] != tokens:
        raise ServerGone("log-probs do not belong to the sampled tokens", where=where)
    logprobs = [entry.logprob for entry in content]
    if not all(math.isfinite(value) for value in logprobs) or min(tokens, default=0) < 0:
        raise ServerGone("log-probs or tokens are no possible numbers", where=where)
    if not 1 <= len(tokens) <= (longest or len(tokens)):
        raise ServerGone(f"{len(tokens)} tokens where 1 to {longest} were asked for", where=where)
    return Completion(
        tokens=tokens,
        logprobs=logprobs,
        spans=_spans(choice.weight_versions or [], len(tokens), where, adapter),
        finish=_finish(choice.finish_reason, where),
        experts=None
        if experts_of is None
        else _experts(choice.routed_experts, experts_of + len(tokens) - 1, where),
    )


def next_logprobs(payload: bytes, where: str) -> dict[int, float]:
    """Parse an answer to ``next_logprobs_body``: token id -> log-prob."""
    choice = _answer(payload, where).choices[0]
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if len(content) != 1:
        raise ServerGone(f"log-probs of {len(content)} places where one was asked for", where=where)
    return {one.token_id: one.logprob for one in content[0].top_logprobs}


def prompt_logprobs(payload: bytes, where: str) -> list[dict[int, float]]:
    """Parse an answer to ``prompt_logprobs_body``: token id -> log-prob for each token but the first."""
    rows = _answer(payload, where).prompt_logprobs
    if rows is None:
        raise ServerRefused("the answer carries no prompt log-probs", where=where)
    try:
        return [{int(key): value.logprob for key, value in row.items()} for row in rows if row is not None]
    except ValueError as error:
        raise ServerGone("prompt log-probs name tokens that are no numbers", where=where) from error


def _answer(payload: bytes, where: str) -> _Answer:
    try:
        answer = _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise ServerGone(f"unreadable answer: {error}: {payload[:200]!r}", where=where) from error
    if not answer.choices:
        raise ServerGone("the answer has no choice", where=where)
    return answer


def _experts(encoded: str | None, positions: int, where: str) -> NDArray[Any]:
    if encoded is None:
        raise NoExperts("the answer has no routed experts", where=where)
    try:
        stream = io.BytesIO(base64.b64decode(encoded))
        found: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)  # type: ignore[no-untyped-call]
    except (ValueError, EOFError) as error:
        raise ServerGone(f"its routed experts are unreadable: {error}", where=where) from error
    if found.ndim != 3 or len(found) != positions or found.dtype not in (np.uint8, np.uint16):
        raise ServerGone(
            f"its routed experts are {found.dtype} {found.shape} for {positions} tokens", where=where
        )
    return found


def _finish(reason: str | None, where: str) -> Finish:
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    raise ServerGone(f"the server ended the request with {reason!r}", where=where)


def _spans(spans: list[_VersionSpan], tokens: int, where: str, adapter: str = "") -> tuple[Span, ...]:
    if adapter:
        if any(version(span.version) != UNLABELLED for span in spans):
            raise ServerGone(f"the weights beneath the adapter were replaced: {spans}", where=where)
        return (Span(version_of(adapter), 0, tokens),)
    result = []
    position = 0
    for span in spans:
        if span.start != position or span.end < span.start:
            raise ServerGone(f"version spans {spans} leave a gap", where=where)
        position = span.end
        if span.end > span.start:
            result.append(Span(version(span.version), span.start, span.end))
    if position != tokens:
        raise ServerGone(f"version spans {spans} do not cover {tokens} tokens", where=where)
    return tuple(result)


def version(label: str) -> int:
    """Return the packed version that a label names; UNLABELLED when it names none."""
    known = label.isascii() and label.isdecimal() and len(label) < _LONGEST_LABEL
    return int(label) if known else UNLABELLED
