"""Proof, at the start of a server, that its log-probs are those the learner will compute.

Two questions. Is the model the same: the learner's canary against the server's prompt log-probs. Is the
sampling what the learner corrects for: the log-probs that come with sampled tokens must equal
log softmax(logits / T) over the whole vocabulary, which is what the trainer computes; a truncated
distribution (top-p, top-k) cannot be equal and is refused outright.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bus.messages import PolicyPublished
from engine.config import Sampling
from engine.errors import ConfigError
from engine.inference.completion import InferenceError
from engine.inference.vllm import VllmClient
from engine.weights.update import canary_error

TRAINER_TEMPERATURE = 1.0  # what engine.training divides logits by
_TOKENS = 16
_TOKENS_FULL = 4  # with the whole vocabulary in each answer


class HandshakeRefused(InferenceError):
    """The two sides do not agree on log-probs."""


@dataclass(frozen=True)
class Handshake:
    """Largest absolute log-prob differences: on the canary, and on tokens sampled at ``temperature``."""

    canary_error: float
    sampling_error: float
    temperature: float
    tokens: int


def check_sampling(sampling: Sampling, key: str) -> None:
    """Raise ConfigError when the trainer cannot correct for ``sampling`` (``key`` is its table's name)."""
    if sampling.temperature != TRAINER_TEMPERATURE:
        raise ConfigError(
            f"[{key}] temperature = {sampling.temperature}, but the trainer computes log-probs at "
            f"temperature {TRAINER_TEMPERATURE}",
            where=key,
            remedy=f"Set it to {TRAINER_TEMPERATURE}.",
        )
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise ConfigError(
            f"[{key}] top_p = {sampling.top_p}, top_k = {sampling.top_k} cut the distribution off, "
            "and the trainer cannot correct for that",
            where=key,
            remedy="Set top_p = 1.0 and top_k = 0.",
        )


async def handshake(
    client: VllmClient, policy: PolicyPublished, sampling: Sampling, *, tolerance: float, deadline: float
) -> Handshake:
    """Compare both sides and return the differences. ``sampling`` is that of trained tokens.

    Raises HandshakeRefused with the figures when one exceeds ``tolerance``; the client's errors.
    """
    error = await canary_error(client, policy, deadline=deadline)
    if error > tolerance:
        raise HandshakeRefused(
            f"the server's log-probs of the canary differ from the learner's by {error:.3g}, "
            f"{tolerance:.3g} is allowed",
            where=client.url,
            remedy="Compare [model] dtype, and the model directory the server was started with.",
        )
    prompt = np.frombuffer(policy.canary_tokens, "<i4").tolist() or [0]
    sampled, tokens = await _sampling_error(client, prompt, sampling, deadline)
    if sampled > tolerance:
        raise HandshakeRefused(
            f"log-probs of tokens sampled at temperature {sampling.temperature} differ from "
            f"log softmax(logits / T) by {sampled:.3g}, {tolerance:.3g} is allowed",
            where=client.url,
            remedy='Leave [server.args] logprobs-mode at "processed_logprobs".',
        )
    return Handshake(error, sampled, sampling.temperature, tokens)


async def _sampling_error(
    client: VllmClient, prompt: list[int], sampling: Sampling, deadline: float
) -> tuple[float, int]:
    tempered = sampling.temperature != 1
    short = Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=_TOKENS_FULL if tempered else _TOKENS,
    )
    completion = await client.generate(prompt, short, deadline=deadline)
    rows = await client.prompt_distribution(
        prompt + completion.tokens, count=-1 if tempered else 0, deadline=deadline
    )
    scored = rows[len(prompt) - 1 :]
    differences = [
        abs(reported - tempered_logprob(row, token, sampling.temperature))
        for token, reported, row in zip(completion.tokens, completion.logprobs, scored, strict=True)
    ]
    return max(differences), len(differences)


def tempered_logprob(row: Mapping[int, float], token: int, temperature: float) -> float:
    """Return the log-prob of ``token`` at ``temperature`` from log-probs at temperature 1.

    For a temperature other than 1, ``row`` must hold the whole vocabulary.
    """
    if temperature == 1:
        return row[token]
    scaled = {key: value / temperature for key, value in row.items()}
    peak = max(scaled.values())
    return scaled[token] - peak - math.log(sum(math.exp(value - peak) for value in scaled.values()))
