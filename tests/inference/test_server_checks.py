"""Checks of servers: external ones before a run starts, and the handshake before one is announced."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from scenes.fake_vllm import fake_vllm, policy

from engine.config import Config, LearnerConfig, ModelConfig, RunConfig, SamplingConfig, ServerConfig
from engine.errors import ConfigError
from engine.inference.completion import ServerGone
from engine.inference.server_checks import (
    HandshakeRefused,
    check_external_servers,
    examine,
    handshake,
    require_experts,
    tempered_logprob,
)
from engine.inference.tokens import tokenizer_digest
from engine.inference.vllm import VllmClient, open_session

PLAIN = SamplingConfig()


async def shake(fake, announced, sampling: SamplingConfig = PLAIN):
    async with open_session() as session:
        return await handshake(
            VllmClient(fake.url, session), announced, sampling, tolerance=1e-3, deadline=5.0
        )


async def test_agreement_is_measured() -> None:
    async with fake_vllm(version="2", loaded="2") as fake:
        result = await shake(fake, policy(2))
    assert result.canary_error < 1e-6
    assert result.sampling_error < 1e-6


async def test_another_model_is_refused_with_the_figure() -> None:
    async with fake_vllm(version="2", loaded="2") as fake:
        with pytest.raises(HandshakeRefused, match=r"differ from the learner's by 0\.5, 0\.001 is allowed"):
            await shake(fake, policy(2, canary_version=3))


@pytest.mark.parametrize("sampling", [PLAIN, SamplingConfig(temperature=0.5)], ids=str)
async def test_logprobs_from_before_the_temperature_are_refused_by_name(sampling: SamplingConfig) -> None:
    """Also where the recipe's own temperature, 1, could not tell the two modes apart."""
    async with fake_vllm(version="2", loaded="2", raw=True) as fake:
        with pytest.raises(
            HandshakeRefused, match=r"before the temperature: 0 from those, \d\.\d+ from"
        ) as it:
            await shake(fake, policy(2), sampling)
    assert "processed_logprobs" in it.value.remedy


async def test_a_tempered_server_agrees_at_its_temperature() -> None:
    async with fake_vllm(version="2", loaded="2") as fake:
        assert (await shake(fake, policy(2), SamplingConfig(temperature=0.5))).sampling_error < 1e-6


async def test_a_shift_of_sampled_logprobs_is_refused_with_the_figure() -> None:
    async with fake_vllm(version="2", loaded="2", sampled_shift=0.125) as fake:
        with pytest.raises(HandshakeRefused, match=r"over all tokens by 0\.125, 0\.001 is allowed"):
            await shake(fake, policy(2))


async def test_another_vocabulary_is_refused_with_both_figures() -> None:
    async with fake_vllm(version="2", loaded="2", vocabulary=64) as fake:
        told = msgspec.structs.replace(policy(2), vocabulary=65)
        with pytest.raises(HandshakeRefused, match="vocabulary has 64 tokens, the learner's 65"):
            await shake(fake, told)
        await shake(fake, msgspec.structs.replace(policy(2), vocabulary=64))


async def test_a_server_that_hides_its_logprobs_is_refused_with_the_flag() -> None:
    faults = {"/inference/v1/generate": ["", "", 400]}  # canary, sample, whole rows
    async with fake_vllm(version="2", loaded="2", faults=faults) as fake:
        with pytest.raises(HandshakeRefused, match="whole vocabulary") as caught:
            await shake(fake, policy(2))
    assert "--max-logprobs -1" in caught.value.remedy


@pytest.mark.parametrize("spoil", [lambda rows: rows[:-1], lambda rows: [{} for _ in rows]])
async def test_a_server_that_scores_other_tokens_is_no_use(spoil, monkeypatch: pytest.MonkeyPatch) -> None:
    true = VllmClient.prompt_distribution

    async def spoilt(self, tokens, *, count, deadline):
        rows = await true(self, tokens, count=count, deadline=deadline)
        return spoil(rows) if count == -1 else rows

    monkeypatch.setattr(VllmClient, "prompt_distribution", spoilt)
    async with fake_vllm(version="2", loaded="2") as fake:
        with pytest.raises(ServerGone, match="other tokens"):
            await shake(fake, policy(2))


async def look(fake, announced, context: int) -> None:
    async with open_session() as session:
        await examine(VllmClient(fake.url, session), announced, context=context)


async def test_a_shorter_context_is_refused_with_both_figures() -> None:
    async with fake_vllm(context=512) as fake:
        await look(fake, policy(1), 512)
        with pytest.raises(HandshakeRefused, match=r"takes 512 tokens.*max_model_len = 1024"):
            await look(fake, policy(1), 1024)


async def test_another_tokenizer_is_refused_with_both_digests(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    same = tokenizer_digest(tmp_path)
    async with fake_vllm(root=str(tmp_path)) as fake:
        await look(fake, msgspec.structs.replace(policy(1), tokenizer=same), 8)
        with pytest.raises(HandshakeRefused, match=f"{same[:12]}, the learner's beefbeefbeef"):
            await look(fake, msgspec.structs.replace(policy(1), tokenizer="beef" * 16), 8)
    async with fake_vllm(root=str(tmp_path / "elsewhere")) as fake:
        await look(fake, msgspec.structs.replace(policy(1), tokenizer="beef" * 16), 8)
    assert tokenizer_digest(tmp_path / "elsewhere") == ""


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=30), st.floats(0.2, 3.0))
def test_tempered_logprob_is_log_softmax_of_scaled_logits(logits: list[float], temperature: float) -> None:
    total = math.log(sum(math.exp(value) for value in logits))
    row = {token: value - total for token, value in enumerate(logits)}
    scaled = [value / temperature for value in logits]
    expected = scaled[0] - math.log(sum(math.exp(value) for value in scaled))
    assert tempered_logprob(row, 0, temperature) == pytest.approx(expected, abs=1e-6)


def recipe(*urls: str, **run: Any) -> Config:
    return Config(
        run=RunConfig(name="adopting", **run),
        model=ModelConfig(path="m", max_model_len=1024),
        server=ServerConfig(urls=urls),
    )


async def test_servers_that_are_ready_pass() -> None:
    async with fake_vllm() as first, fake_vllm(context=1024) as second:
        await check_external_servers(recipe(first.url, f"{second.url}/"))
        assert first.calls["/weight_info"] == second.calls["/weight_info"] == 1


async def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"nothing answers at {url}.*Start that server first"):
            await check_external_servers(recipe(url))


async def test_another_host_asks_its_own_servers() -> None:
    await check_external_servers(recipe("http://host.invalid:8000", roles=("scorer", "learner")))


@pytest.mark.parametrize("fault", [503, "drop"])
async def test_a_server_that_is_not_ready_yet_is_left_to_its_role(fault: int | str) -> None:
    async with fake_vllm(faults={"/health": [fault, fault]}) as server:
        await check_external_servers(recipe(server.url))


async def test_something_else_is_no_server() -> None:
    runner = web.AppRunner(web.Application(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        with pytest.raises(ConfigError, match=f"{url} is no vLLM server.*HTTP 404"):
            await check_external_servers(recipe(url))
    finally:
        await runner.cleanup()


async def test_a_context_that_is_too_short_is_told_with_both_figures() -> None:
    async with fake_vllm(context=512) as server:
        with pytest.raises(ConfigError, match=r"takes 512 tokens.*max_model_len = 1024"):
            await check_external_servers(recipe(server.url))


async def test_a_server_that_returns_no_experts_is_refused_before_the_run_and_at_the_handshake() -> None:
    async with fake_vllm() as server, open_session() as session:
        replaying = msgspec.structs.replace(recipe(server.url), learner=LearnerConfig(router_replay=True))
        with pytest.raises(ConfigError, match=r"no routed experts.*--enable-return-routed-experts"):
            await check_external_servers(replaying)
        with pytest.raises(HandshakeRefused, match="no routed experts"):
            await require_experts(VllmClient(server.url, session), deadline=5.0)
        server.experts = (2, 4)
        await check_external_servers(replaying)
        await require_experts(VllmClient(server.url, session), deadline=5.0)


async def test_a_server_whose_weights_nobody_may_load_is_told_the_variable() -> None:
    async with fake_vllm(faults={"/weight_info": [404]}) as server:
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            await check_external_servers(recipe(server.url))
