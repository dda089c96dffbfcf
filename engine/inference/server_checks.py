"""Checks that a vLLM server can be used: before a run starts, and before the server is announced.

Before a run, each external server must answer, be vLLM, accept weights and take the context
(:func:`check_external_servers`). Before a server is announced, its log-probs must be those that the learner
will compute (:func:`handshake`): same tokenizer, vocabulary and context (:func:`examine`); the same model, by
the learner's canary; and sampling that the learner can correct for. The log-probs of sampled tokens must
equal log softmax(logits / T) over the whole vocabulary, as the trainer computes them. Those of a distribution
that is truncated (top-p, top-k) or masked cannot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from bus.messages import PolicyPublished
from engine.config import Config, SamplingConfig
from engine.errors import ConfigError
from engine.inference.completion import InferenceError, ServerGone, ServerRefused, ServerStuck
from engine.inference.tokens import tokenizer_digest
from engine.inference.vllm import VllmClient, open_session
from engine.inference.vllm_schema import NoExperts

_EXTERNAL_SECONDS = 5.0  # deadline of a question to an external server
_TOKENS = 16
_TOKENS_FULL = 4  # with the whole vocabulary in each answer
_OTHER_TEMPERATURE = 0.5  # tells log-probs before the temperature from those after it
_TELLING = 0.02  # below this mean difference the two cannot be told apart

_Sampled = tuple[int, float, dict[int, float]]
"""A token, its log-prob as reported, log-probs at its place at temperature 1."""


class HandshakeRefused(InferenceError):
    """Server and learner do not agree on log-probs."""


class Handshake(NamedTuple):
    """Largest absolute log-prob differences: on the canary, and on sampled tokens."""

    canary_error: float
    sampling_error: float


async def check_external_servers(config: Config) -> None:
    """Check each of ``server.urls`` before a run starts anything.

    A server that listens but is not ready yet passes: its role waits for it (``server.start_seconds``).
    Raises ConfigError that names the URL and the remedy.
    """
    if not config.server.urls or "server" not in config.run.roles:
        return
    async with open_session() as session:
        for url in config.server.urls:
            try:
                await _check_external(VllmClient(url, session), config)
            except ServerStuck:
                continue
            except ServerGone as error:
                if not isinstance(error.__cause__, OSError):
                    continue  # it answered, and is not ready
                raise ConfigError(
                    f"server.urls: nothing answers at {url} ({error.what}).",
                    remedy="Start that server first, or take it out of server.urls. "
                    "`spade run RECIPE --dry-run` shows the command line that it needs.",
                ) from error


async def _check_external(client: VllmClient, config: Config) -> None:
    try:
        await client.health(deadline=_EXTERNAL_SECONDS)
    except ServerRefused as error:
        raise ConfigError(
            f"server.urls: {client.url} is no vLLM server ({error.what.partition(': <')[0][:100]}).",
            remedy="Give the root of one, such as http://127.0.0.1:8000.",
        ) from error
    _, length = await client.model(deadline=_EXTERNAL_SECONDS)
    if length and length < config.model.max_model_len:
        raise ConfigError(
            f"server.urls: {client.url} takes {length} tokens of prompt and completion together, "
            f"model.max_model_len = {config.model.max_model_len}.",
            remedy="Start it with --max-model-len, or lower model.max_model_len.",
        )
    if config.learner.router_replay:
        try:
            await require_experts(client, deadline=_EXTERNAL_SECONDS)
        except HandshakeRefused as error:
            raise ConfigError(f"server.urls: {client.url}: {error.what}.", remedy=error.remedy) from error
    if config.adapters:
        return
    try:
        await client.version(deadline=_EXTERNAL_SECONDS)
    except ServerRefused as error:
        raise ConfigError(
            f"server.urls: {client.url} does not let weights be loaded ({error.what}).",
            remedy="Start it with VLLM_SERVER_DEV_MODE=1 in its environment and the flags that "
            "`spade run RECIPE --dry-run` shows.",
        ) from error


async def require_experts(client: VllmClient, *, deadline: float) -> None:
    """Check that the server returns routed experts. Raises HandshakeRefused; the client's errors."""
    try:
        await client.generate([0], SamplingConfig(max_tokens=1), deadline=deadline, experts_from=0)
    except NoExperts as error:
        raise HandshakeRefused(
            "it returns no routed experts, and learner.router_replay = true replays them",
            where=client.url,
            remedy="Start it with --enable-return-routed-experts, or set learner.router_replay to false.",
        ) from error


async def examine(client: VllmClient, policy: PolicyPublished, *, context: int) -> None:
    """Compare the length of the context and, where the server's model lies on this host, the tokenizer.

    Needs no weights. ``context`` is the length that the recipe promises its roles. Raises HandshakeRefused
    with both sides' figures; the client's errors.
    """
    root, length = await client.model()
    if length and length < context:
        raise HandshakeRefused(
            f"the server takes {length} tokens of prompt and completion together, [model] max_model_len = "
            f"{context} are promised",
            where=client.url,
            remedy="Start it with --max-model-len, or lower model.max_model_len.",
        )
    found = await anyio.to_thread.run_sync(tokenizer_digest, Path(root)) if root and policy.tokenizer else ""
    if found and found != policy.tokenizer:
        raise HandshakeRefused(
            f"the tokenizer in {root} has the SHA-256 {found[:12]}, the learner's {policy.tokenizer[:12]}: "
            "the same ids would mean other texts",
            where=client.url,
            remedy="Start the server from the model directory of the run.",
        )


async def canary_error(client: VllmClient, policy: PolicyPublished, *, deadline: float) -> float:
    """Return the largest absolute log-prob difference on the policy's canary prompt (0 for no canary).

    Not-a-number on either side counts as infinite. Raises HandshakeRefused for a canary whose tokens and
    log-probs do not fit together; the client's errors.
    """
    tokens = np.frombuffer(policy.canary_tokens, "<i4").tolist()
    expected = np.frombuffer(policy.canary_logprobs, "<f4").astype(np.float64)
    if len(expected) != max(0, len(tokens) - 1):
        raise HandshakeRefused(f"the canary has {len(tokens)} tokens and {len(expected)} log-probs")
    if not len(expected):
        return 0.0
    found = np.asarray(await client.prompt_logprobs(tokens, deadline=deadline))
    error = float(np.max(np.abs(found - expected)))
    return error if np.isfinite(error) else float("inf")


async def handshake(
    client: VllmClient,
    policy: PolicyPublished,
    sampling: SamplingConfig,
    *,
    tolerance: float,
    deadline: float,
) -> Handshake:
    """Compare log-probs of both sides and return the differences. ``sampling`` is that of trained tokens.

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
    await _check_mode(client, prompt[:1], policy.vocabulary, deadline)
    sampled = await _sampling_error(client, prompt, sampling, deadline)
    if sampled > tolerance:
        raise HandshakeRefused(
            f"log-probs of tokens sampled at temperature {sampling.temperature} differ from "
            f"log softmax(logits / T) over all tokens by {sampled:.3g}, {tolerance:.3g} is allowed",
            where=client.url,
            remedy='Leave [server.args] logprobs-mode at "processed_logprobs", and mask no tokens.',
        )
    return Handshake(error, sampled)


async def _sample(
    client: VllmClient, prompt: list[int], sampling: SamplingConfig, deadline: float, *, whole: bool
) -> list[_Sampled]:
    """Sample a few tokens and let the server score them."""
    completion = await client.generate(prompt, sampling, deadline=deadline)
    rows = await client.prompt_distribution(
        prompt + completion.tokens, count=-1 if whole else 0, deadline=deadline
    )
    scored = rows[len(prompt) - 1 :]
    if len(scored) != len(completion.tokens) or not all(map(dict.__contains__, scored, completion.tokens)):
        raise ServerGone("its prompt log-probs are those of other tokens", where=client.url)
    return list(zip(completion.tokens, completion.logprobs, scored, strict=True))


async def _check_mode(client: VllmClient, prompt: list[int], vocabulary: int, deadline: float) -> None:
    """Check that reported log-probs are those after the temperature, and the size of the vocabulary."""
    sampling = SamplingConfig(temperature=_OTHER_TEMPERATURE, max_tokens=_TOKENS_FULL)
    try:
        found = await _sample(client, prompt, sampling, deadline, whole=True)
    except ServerRefused as error:
        raise HandshakeRefused(
            f"the server does not report the log-probs of its whole vocabulary: {error.what}",
            where=client.url,
            remedy="Start it with --max-logprobs -1.",
        ) from error
    sizes = {len(row) for _, _, row in found}
    if vocabulary and sizes != {vocabulary}:
        raise HandshakeRefused(
            f"the server's vocabulary has {max(sizes)} tokens, the learner's {vocabulary}",
            where=client.url,
            remedy="Start it from the model directory of the run.",
        )
    mean = len(found)
    tempered = await _tempered(found, _OTHER_TEMPERATURE)
    after = sum(abs(seen - expected) for (_, seen, _), expected in zip(found, tempered, strict=True))
    before = sum(abs(seen - row[token]) for token, seen, row in found)
    apart = sum(abs(expected - row[token]) for (token, _, row), expected in zip(found, tempered, strict=True))
    if apart / mean > _TELLING and after - before > apart / 2:
        raise HandshakeRefused(
            f"at temperature {_OTHER_TEMPERATURE} the server reports log-probs from before the temperature: "
            f"{before / mean:.3g} from those, {after / mean:.3g} from log softmax(logits / T)",
            where=client.url,
            remedy="Start it with --logprobs-mode processed_logprobs.",
        )


async def _sampling_error(
    client: VllmClient, prompt: list[int], sampling: SamplingConfig, deadline: float
) -> float:
    """Return the largest log-prob error of a few sampled tokens."""
    tempered = sampling.temperature != 1
    short = SamplingConfig(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=_TOKENS_FULL if tempered else _TOKENS,
    )
    found = await _sample(client, prompt, short, deadline, whole=tempered)
    right = await _tempered(found, sampling.temperature)
    return max(abs(seen - expected) for (_, seen, _), expected in zip(found, right, strict=True))


async def _tempered(found: list[_Sampled], temperature: float) -> list[float]:
    """Return the log-prob that each token should have; computed in a thread, since rows hold vocabularies."""
    return await anyio.to_thread.run_sync(
        lambda: [tempered_logprob(row, token, temperature) for token, _, row in found]
    )


def tempered_logprob(row: Mapping[int, float], token: int, temperature: float) -> float:
    """Return the log-prob of ``token`` at ``temperature`` from log-probs at temperature 1.

    For a temperature other than 1, ``row`` must hold the whole vocabulary.
    """
    if temperature == 1:
        return row[token]
    scaled = {key: value / temperature for key, value in row.items()}
    peak = max(scaled.values())
    return scaled[token] - peak - math.log(sum(math.exp(value - peak) for value in scaled.values()))
