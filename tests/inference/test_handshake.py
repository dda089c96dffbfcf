"""The handshake accepts what agrees and refuses, with figures, what does not."""

from __future__ import annotations

import math

import pytest
from fake_vllm import fake_vllm, policy
from hypothesis import given
from hypothesis import strategies as st

from engine.config import Sampling
from engine.errors import ConfigError
from engine.inference.handshake import HandshakeRefused, check_sampling, handshake, tempered_logprob
from engine.inference.vllm import VllmClient, open_session

PLAIN = Sampling()


async def shake(fake, announced, sampling: Sampling = PLAIN):
    async with open_session() as session:
        return await handshake(
            VllmClient(fake.url, session), announced, sampling, tolerance=1e-3, deadline=5.0
        )


async def test_agreement_is_measured() -> None:
    async with fake_vllm(version="2", loaded="2") as fake:
        result = await shake(fake, policy(2))
    assert result.canary_error < 1e-6
    assert result.sampling_error < 1e-6
    assert result.tokens == 4


async def test_another_model_is_refused_with_the_figure() -> None:
    async with fake_vllm(version="2", loaded="2") as fake:
        with pytest.raises(HandshakeRefused, match=r"differ from the learner's by 0\.5, 0\.001 is allowed"):
            await shake(fake, policy(2, canary_version=3))


async def test_untempered_logprobs_are_refused_with_the_figure() -> None:
    async with fake_vllm(version="2", loaded="2") as fake:
        with pytest.raises(HandshakeRefused, match=r"temperature 0\.5 differ from log softmax"):
            await shake(fake, policy(2), Sampling(temperature=0.5))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_p=0.9), Sampling(top_k=5), Sampling(temperature=0.0), Sampling(temperature=0.7)],
    ids=str,
)
def test_sampling_that_cannot_be_corrected_is_refused(sampling: Sampling) -> None:
    with pytest.raises(ConfigError, match=r"agent\.sampling"):
        check_sampling(sampling, "agent.sampling")
    check_sampling(Sampling(), "agent.sampling")


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=30), st.floats(0.2, 3.0))
def test_tempered_logprob_is_log_softmax_of_scaled_logits(logits: list[float], temperature: float) -> None:
    total = math.log(sum(math.exp(value) for value in logits))
    row = {token: value - total for token, value in enumerate(logits)}
    scaled = [value / temperature for value in logits]
    expected = scaled[0] - math.log(sum(math.exp(value) for value in scaled))
    assert tempered_logprob(row, 0, temperature) == pytest.approx(expected, abs=1e-6)
