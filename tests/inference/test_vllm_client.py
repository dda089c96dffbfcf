"""The HTTP client: what it reads, and the name it gives to each fault."""

from __future__ import annotations

import base64
import io
import json

import anyio
import msgspec
import numpy as np
import pytest
from scenes.fake_vllm import fake_vllm

from engine.config import SamplingConfig
from engine.inference import vllm, vllm_schema
from engine.inference.completion import ServerGone, ServerRefused, ServerStuck
from engine.inference.health_prober import congestion
from engine.inference.vllm import VllmClient, open_session


def answer(**changes) -> bytes:
    choice = {
        "token_ids": [5, 6],
        "finish_reason": "length",
        "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -2.0}]},
        "weight_versions": [
            {"version": "7", "start": 0, "end": 1},
            {"version": "9", "start": 1, "end": 2},
        ],
    }
    return json.dumps({"choices": [choice | changes]}).encode()


def test_a_good_answer() -> None:
    completion = vllm_schema.completion(answer(), "here")
    assert completion.tokens == [5, 6]
    assert completion.logprobs == [-1.0, -2.0]
    assert [tuple(msgspec.to_builtins(span)) for span in completion.spans] == [(7, 0, 1), (9, 1, 2)]
    assert completion.finish == "length"


def test_tokens_before_the_first_push_have_no_version() -> None:
    spans = [{"version": "default", "start": 0, "end": 2}]
    assert (
        vllm_schema.completion(answer(weight_versions=spans), "here").spans[0].version
        == vllm_schema.UNLABELLED
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logprobs": None}, "log-probs"),
        ({"logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]}}, "log-probs"),
        ({"logprobs": {"content": [{"token_id": token, "logprob": 1e999} for token in (5, 6)]}}, "."),
        ({"token_ids": [6, 5]}, "log-probs"),
        ({"token_ids": [], "logprobs": None, "weight_versions": None}, "0 tokens"),
        ({"weight_versions": None}, "cover"),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 1}]}, "cover"),
        ({"weight_versions": [{"version": "7", "start": 1, "end": 2}]}, "gap"),
        ({"finish_reason": "abort"}, "abort"),
        ({"token_ids": "x"}, "unreadable"),
    ],
)
def test_bad_answers_are_named(changes: dict, says: str) -> None:
    """All are the server's fault: another may know better."""
    with pytest.raises(ServerGone, match=says):
        vllm_schema.completion(answer(**changes), "here")


def test_experts_are_asked_for_and_read_as_vllm_encodes_them() -> None:
    """Those of the tokens from the first one asked for to the last but one, as vLLM's ``numpy2base64``."""
    body = json.loads(
        vllm_schema.generate_body([1, 2, 3], SamplingConfig(), stop_token_ids=(), salt=None, experts_from=1)
    )
    assert body["sampling_params"]["routed_experts_prompt_start"] == 1
    plain = vllm_schema.generate_body([1], SamplingConfig(), stop_token_ids=(), salt=None)
    assert b"routed_experts" not in plain

    rows = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)  # two of the prompt, one of two that were sampled
    (choice,) = json.loads(answer())["choices"]
    given = json.dumps({"choices": [choice | {"routed_experts": npy(rows)}]}).encode()
    found = vllm_schema.completion(given, "here", experts_of=2)
    np.testing.assert_array_equal(found.experts, rows)
    assert vllm_schema.completion(given, "here").experts is None
    with pytest.raises(vllm_schema.NoExperts, match="no routed experts"):
        vllm_schema.completion(answer(), "here", experts_of=2)
    for bad in (npy(rows[1:]), npy(rows.astype(np.int32)), npy(rows.reshape(3, 4)), "AAAA", "?"):
        damaged = json.dumps({"choices": [choice | {"routed_experts": bad}]}).encode()
        with pytest.raises(ServerGone, match="routed experts are"):
            vllm_schema.completion(damaged, "here", experts_of=2)


def npy(array: np.ndarray) -> str:
    with io.BytesIO() as stream:
        np.save(stream, array, allow_pickle=False)
        return base64.b64encode(stream.getvalue()).decode()


def test_more_tokens_than_were_asked_for_are_no_answer() -> None:
    with pytest.raises(ServerGone, match="2 tokens where 1 to 1"):
        vllm_schema.completion(answer(), "here", longest=1)


@pytest.mark.parametrize("payload", [b"", b"<html>", b'{"choices": []}', b"[1]", b'\xff\xfe{"', b"NaN"])
def test_garbage_is_unreadable(payload: bytes) -> None:
    with pytest.raises(ServerGone):
        vllm_schema.completion(payload, "here")
    with pytest.raises(ServerGone):
        vllm_schema.prompt_logprobs(payload, "here")


@pytest.mark.parametrize("label", ["default", "", "-1", "1.5", "9" * 40, "\u0663"])
def test_labels_that_name_no_version(label: str) -> None:
    assert vllm_schema.version(label) == vllm_schema.UNLABELLED


async def test_garbage_on_any_route_is_a_server_gone() -> None:
    routes = ("/weight_info", "/is_paused", "/inference/v1/generate", "/v1/models")
    faults = {route: ["garbage"] * 2 for route in routes}
    async with fake_vllm(faults=faults) as fake, open_session() as session:
        client = VllmClient(fake.url, session)
        for call in (client.version, client.paused, client.model):
            with pytest.raises(ServerGone, match="unreadable"):
                await call()
        with pytest.raises(ServerGone, match="unreadable"):
            await client.prompt_logprobs([1, 2], deadline=5.0)


async def test_a_stalled_answer_ends_at_the_deadline() -> None:
    async with fake_vllm(faults={"/inference/v1/generate": ["stall"]}) as fake, open_session() as session:
        with anyio.fail_after(5), pytest.raises(ServerStuck, match=r"no answer in 0\.2 s"):
            await VllmClient(fake.url, session).generate([1], SamplingConfig(), deadline=0.2)


async def test_an_answer_without_end_is_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_LONGEST_ANSWER", 50)
    async with fake_vllm() as fake, open_session() as session:
        with pytest.raises(ServerGone, match="longer than"):
            await VllmClient(fake.url, session).generate([1], SamplingConfig(), deadline=5.0)


async def test_the_model_is_told_or_not() -> None:
    faults = {"/v1/models": [404]}
    async with fake_vllm(root="/m", context=256, faults=faults) as fake, open_session() as session:
        client = VllmClient(fake.url, session)
        assert await client.model() == ("", 0)
        assert await client.model() == ("/m", 256)


@pytest.mark.parametrize(
    ("fault", "error"),
    [([400], ServerRefused), ([404], ServerRefused), ([500], ServerGone), ([503], ServerGone)],
)
async def test_statuses_are_named(fault: list, error: type[Exception]) -> None:
    async with fake_vllm(faults={"/inference/v1/generate": fault}) as fake, open_session() as session:
        with pytest.raises(error, match=str(fault[0])):
            await VllmClient(fake.url, session).generate([1], SamplingConfig(), deadline=5.0)


async def test_two_drops_are_a_server_gone_one_is_not() -> None:
    faults = {"/inference/v1/generate": ["drop", "", "drop", "drop"]}
    async with fake_vllm(faults=faults) as fake, open_session() as session:
        client = VllmClient(fake.url, session)
        assert (await client.generate([1], SamplingConfig(), deadline=5.0)).tokens
        with pytest.raises(ServerGone):
            await client.generate([1], SamplingConfig(), deadline=5.0)


async def test_silence_is_stuck_and_a_closed_port_is_gone() -> None:
    async with fake_vllm(faults={"/inference/v1/generate": ["hang"]}) as fake, open_session() as session:
        client = VllmClient(fake.url, session)
        with anyio.fail_after(5), pytest.raises(ServerStuck, match=r"no answer in 0\.1 s"):
            await client.generate([1], SamplingConfig(), deadline=0.1)
        with pytest.raises(ServerGone):
            await VllmClient("http://127.0.0.1:9", session).generate([1], SamplingConfig(), deadline=5.0)


async def test_the_second_attempt_has_what_the_first_one_left_of_the_deadline() -> None:
    faults = {"/inference/v1/generate": ["late:0.9", "hang"]}
    async with fake_vllm(faults=faults) as fake, open_session() as session:
        with anyio.fail_after(1.7), pytest.raises(ServerStuck):
            await VllmClient(fake.url, session).generate([1], SamplingConfig(), deadline=1.0)
    assert fake.calls["/inference/v1/generate"] == 2


async def test_control_routes() -> None:
    async with fake_vllm() as fake, open_session() as session:
        client = VllmClient(fake.url + "/", session)
        assert await client.version() == vllm_schema.UNLABELLED
        assert not await client.paused()
        await client.pause(clear_cache=True)
        assert await client.paused()
        await client.resume()
        assert await client.probe(deadline=5.0) == vllm_schema.UNLABELLED
        fake.version = "7"
        assert await client.probe(deadline=5.0) == 7
        assert await client.healthy(deadline=5.0)
        fake.healthy = False
        assert not await client.healthy(deadline=5.0)
        assert not await client.until_healthy(seconds=0.05)


def test_congestion_reads_all_engines_and_only_the_named_series() -> None:
    text = "\n".join(
        (
            "# HELP vllm:num_requests_waiting Number of requests waiting.",
            'vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0',
            'vllm:num_requests_waiting{engine="1",model_name="policy"} 3.0',
            'vllm:num_requests_waiting_by_reason{engine="0"} 9.0',
            'vllm:num_preemptions_total{engine="0"} 4.0',
            'vllm:num_preemptions_created{engine="0"} 1.7e9',
        )
    )
    assert congestion(text) == (5.0, 4.0)
    assert congestion("") == (0.0, 0.0)
    usage = 'vllm:kv_cache_usage_perc{engine="0"} 0.3\nvllm:kv_cache_usage_perc{engine="1"} '
    assert congestion(f"{text}\n{usage}0.4") == (0.0, 4.0), "they wait for prefill, not for room"
    assert congestion(f"{text}\n{usage}0.97") == (5.0, 4.0)
    assert congestion('vllm:num_requests_waiting{engine="0"} many') == (0.0, 0.0)
