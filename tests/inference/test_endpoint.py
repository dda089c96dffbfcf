"""The client of an OpenAI-compatible endpoint, against a real local server."""

from __future__ import annotations

import time
from collections.abc import Iterable
from email.utils import formatdate
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from scenes.endpoint_fake import Behaviour, Drop, FakeEndpoint, Hang, Raw, Say, Script, fake_endpoint

from engine.config import EndpointConfig as Settings
from engine.config import SamplingConfig
from engine.errors import ConfigError, SpadeError
from engine.inference import endpoint as module
from engine.inference.completion import InferenceUnavailable
from engine.inference.endpoint import EndpointMisused, EndpointRefused, Pace, key_of, open_endpoint

SAMPLING = SamplingConfig(temperature=0.6, top_p=0.95, max_tokens=77)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_DELAY", 0.001)


def play(*behaviours: Behaviour) -> Script:
    """Do one after the other, the last one for ever."""
    rest = list(behaviours)
    return lambda _: rest.pop(0) if len(rest) > 1 else rest[0]


def settings(fake: FakeEndpoint, **fields: Any) -> Settings:
    values: dict[str, Any] = {"model": "m", "request_seconds": 5.0, "tries": 3, **fields}
    return Settings(base_url=fake.url, **values)


async def test_a_conversation_is_asked_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", " secret ")
    async with fake_endpoint(play(Say("well", "length"))) as fake:
        prices = settings(fake, key_env="THE_KEY", price_in=2.0, price_out=10.0, extra={"reasoning": "low"})
        async with open_endpoint(prices) as endpoint:
            answer = await endpoint.write(["one", "two", "three"], sampling=SAMPLING, system="be brief")
            statistics = endpoint.statistics()
    assert (answer.text, answer.finish, answer.tokens_in, answer.tokens_out) == ("well", "length", 100, 20)
    (body,) = fake.bodies
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert (body["model"], body["max_tokens"], body["reasoning"]) == ("m", 77, "low")
    assert (body["temperature"], body["top_p"]) == (0.6, 0.95)
    assert "seed" not in body
    assert fake.keys == ["Bearer secret"]
    assert (statistics["tokens_in"], statistics["tokens_out"], statistics["requests"]) == (100, 20, 1)
    assert statistics["cost"] == pytest.approx((100 * 2 + 20 * 10) / 1e6)


async def test_fields_that_an_endpoint_does_not_take_are_left_out() -> None:
    async with fake_endpoint(play(Say("x"))) as fake:
        odd = settings(fake, tokens_field="max_completion_tokens", send_sampling=False, send_seed=True)
        async with open_endpoint(odd) as endpoint:
            await endpoint.write(["one"], sampling=SAMPLING, seed=5)
    (body,) = fake.bodies
    assert set(body) == {"model", "messages", "max_completion_tokens", "seed"}
    assert fake.keys == [""]


async def test_text_that_is_no_unicode_is_mended_or_no_answer() -> None:
    """Half a surrogate pair cannot be encoded: nothing behind the endpoint could be told of it."""
    body = rb'{"choices": [{"message": {"content": "a \ud800 b"}, "finish_reason": "stop"}]}'
    async with (
        fake_endpoint(play(Raw(body), Say("whole"))) as fake,
        open_endpoint(settings(fake)) as endpoint,
    ):
        answer = await endpoint.write(["x"], sampling=SAMPLING)
        assert answer.text.encode()


async def test_an_answer_in_parts_is_one_text() -> None:
    parts = b'[{"type": "thinking"}, {"type": "text", "text": "a "}, {"type": "text", "text": "b"}]'
    body = b'{"choices": [{"message": {"content": ' + parts + b'}, "finish_reason": "stop"}]}'
    async with fake_endpoint(play(Raw(body))) as fake, open_endpoint(settings(fake)) as endpoint:
        assert (await endpoint.write(["x"], sampling=SAMPLING)).text == "a b"
        assert len(fake.bodies) == 1


FAULTS: Iterable[tuple[str, Behaviour]] = (
    ("http_500", Raw(b"oops", 500)),
    ("http_429", Raw(b"slow down", 429, {"Retry-After": "0.01"})),
    ("closed", Drop()),
    ("slow", Hang()),
    ("no json", Raw(b"<html>")),
    ("no choices", Raw(b'{"choices": []}')),
    ("no message", Raw(b'{"choices": [{}]}')),
    ("wrong types", Raw(b'{"choices": [{"message": {"content": 7}}]}')),
)


@pytest.mark.parametrize("fault", [fault for _, fault in FAULTS], ids=[name for name, _ in FAULTS])
async def test_a_passing_fault_is_retried_and_a_lasting_one_is_infrastructure(fault: Behaviour) -> None:
    async with fake_endpoint(play(fault, Say("at last"))) as fake:
        seconds = 0.2 if isinstance(fault, Hang) else 5.0
        async with open_endpoint(settings(fake, request_seconds=seconds)) as endpoint:
            assert (await endpoint.write(["x"], sampling=SAMPLING)).text == "at last"
            assert endpoint.statistics()["retries"] == 1
        fake.script = play(fault)
        async with open_endpoint(settings(fake, request_seconds=seconds, tries=2)) as endpoint:
            with pytest.raises(InferenceUnavailable, match="2 requests failed"):
                await endpoint.write(["x"], sampling=SAMPLING)
            assert (endpoint.statistics()["requests"], endpoint.statistics()["failed"]) == (2, 1)


async def test_an_unreachable_endpoint_is_infrastructure() -> None:
    async with fake_endpoint(play(Say("x"))) as fake:
        gone = settings(fake, tries=2)
    async with open_endpoint(gone) as endpoint:
        with pytest.raises(InferenceUnavailable, match="connection failed"):
            await endpoint.write(["x"], sampling=SAMPLING)


@pytest.mark.parametrize("status", [401, 402, 403, 404, 405])
async def test_a_wrong_key_model_or_address_is_the_recipes_fault(status: int) -> None:
    async with fake_endpoint(play(Raw(b"who are you", status))) as fake:
        async with open_endpoint(settings(fake)) as endpoint:
            with pytest.raises(EndpointMisused, match=f"HTTP {status}: who are you"):
                await endpoint.write(["x"], sampling=SAMPLING)
        assert len(fake.bodies) == 1


@pytest.mark.parametrize("status", [400, 401, 500])
async def test_no_reason_holds_the_key(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "sk-secret")
    async with (
        fake_endpoint(play(Raw(b"wrong key sk-secret, sir", status))) as fake,
        open_endpoint(settings(fake, key_env="THE_KEY", tries=1)) as endpoint,
    ):
        with pytest.raises(SpadeError, match=r"wrong key \(the key\), sir") as caught:
            await endpoint.write(["x"], sampling=SAMPLING)
    assert "secret" not in str(caught.value)


async def test_an_address_that_has_moved_is_the_recipes_fault() -> None:
    async with fake_endpoint(play(Raw(b"", 308, {"Location": "https://elsewhere/v2"}))) as fake:
        async with open_endpoint(settings(fake)) as endpoint:
            with pytest.raises(EndpointMisused, match=r"HTTP 308: https://elsewhere/v2.*base_url"):
                await endpoint.write(["x"], sampling=SAMPLING)
        assert len(fake.bodies) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_what_the_endpoint_will_not_do_is_not_asked_twice(status: int) -> None:
    async with fake_endpoint(play(Raw(b"too long", status))) as fake:
        async with open_endpoint(settings(fake)) as endpoint:
            with pytest.raises(EndpointRefused, match=f"HTTP {status}: too long"):
                await endpoint.write(["x"], sampling=SAMPLING)
            assert (endpoint.statistics()[f"http_{status}"], endpoint.statistics()["refused"]) == (1, 1)
        assert len(fake.bodies) == 1


async def test_an_endpoint_that_refuses_all_from_the_start_is_the_recipes_fault() -> None:
    """A field that it does not know is refused with the status of a filtered prompt."""
    refusals = [Raw(b"unsupported parameter", 400)] * 20
    async with fake_endpoint(play(*refusals)) as fake, open_endpoint(settings(fake)) as endpoint:
        for _ in range(19):
            with pytest.raises(EndpointRefused):
                await endpoint.write(["x"], sampling=SAMPLING)
        with pytest.raises(EndpointMisused, match=r"first 20 requests.*unsupported parameter.*tokens_field"):
            await endpoint.write(["x"], sampling=SAMPLING)
    async with (
        fake_endpoint(play(Say("once"), *refusals)) as fake,
        open_endpoint(settings(fake)) as endpoint,
    ):
        await endpoint.write(["x"], sampling=SAMPLING)
        for _ in range(25):
            with pytest.raises(EndpointRefused):
                await endpoint.write(["x"], sampling=SAMPLING)


async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_ANSWER", 1 << 20)
    async with (
        fake_endpoint(play(Raw(b" " * (2 << 20)))) as fake,
        open_endpoint(settings(fake, tries=1)) as endpoint,
    ):
        with pytest.raises(InferenceUnavailable, match="longer than 1 MiB"):
            await endpoint.write(["x"], sampling=SAMPLING)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (b'{"message": {"content": null, "refusal": "I will not"}, "finish_reason": "stop"}', "I will not"),
        (b'{"message": {"content": ""}, "finish_reason": "content_filter"}', "content filter"),
        (b'{"message": {"content": "half a"}, "finish_reason": "content_filter"}', "content filter"),
    ],
)
async def test_a_refusal_with_status_200_is_one_and_is_paid(choice: bytes, reason: str) -> None:
    body = b'{"choices": [' + choice + b'], "usage": {"prompt_tokens": 100, "completion_tokens": 20}}'
    async with fake_endpoint(play(Raw(body))) as fake:
        async with open_endpoint(settings(fake, price_in=10.0)) as endpoint:
            with pytest.raises(EndpointRefused, match=reason):
                await endpoint.write(["x"], sampling=SAMPLING)
            assert endpoint.statistics()["cost"] == pytest.approx(0.001)
        assert len(fake.bodies) == 1


def choice(finish: object, text: str = "half a text", **more: Any) -> bytes:
    entry = {"message": {"content": text}, "finish_reason": finish, **more}
    return msgspec.json.encode({"choices": [entry]})


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("stop", "stop"),
        ("STOP", "stop"),
        ("end_turn", "stop"),
        ("eos", "stop"),
        ("length", "length"),
        ("max_tokens", "length"),
        ("MAX_TOKENS", "length"),
        ("model_context_window_exceeded", "length"),
    ],
)
async def test_whole_and_cut_answers_by_their_known_names(reason: str, finish: str) -> None:
    async with (
        fake_endpoint(play(Raw(choice(reason)))) as fake,
        open_endpoint(settings(fake)) as endpoint,
    ):
        reply = await endpoint.write(["x"], sampling=SAMPLING)
    assert (reply.text, reply.finish) == ("half a text", finish)


@pytest.mark.parametrize(
    "reason", ["error", "network_error", "insufficient_system_resource", "tool_calls", "aborted", "", None]
)
async def test_an_answer_that_ended_in_another_way_is_asked_again(reason: str | None) -> None:
    """Half a program is no attempt, half a hint no hint."""
    async with fake_endpoint(play(Raw(choice(reason)), Say("whole"))) as fake:
        async with open_endpoint(settings(fake)) as endpoint:
            assert (await endpoint.write(["x"], sampling=SAMPLING)).text == "whole"
            assert endpoint.statistics()["unfinished"] == 1
        fake.script = play(Raw(choice(reason)))
        async with open_endpoint(settings(fake, tries=2)) as endpoint:
            with pytest.raises(InferenceUnavailable, match="may not be whole"):
                await endpoint.write(["x"], sampling=SAMPLING)


@pytest.mark.parametrize("reason", ["SAFETY", "sensitive", "content_filter", "refusal", "PROHIBITED_CONTENT"])
@pytest.mark.parametrize("text", ["", "half a text"])
async def test_a_filtered_answer_is_a_refusal(reason: str, text: str) -> None:
    async with (
        fake_endpoint(play(Raw(choice(reason, text)))) as fake,
        open_endpoint(settings(fake)) as endpoint,
    ):
        with pytest.raises(EndpointRefused, match=reason.lower()):
            await endpoint.write(["x"], sampling=SAMPLING)
        assert len(fake.bodies) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"code": 402, "message": "no credit"}, EndpointMisused),
        ({"code": "401"}, EndpointMisused),
        ({"status": 404}, EndpointMisused),
        ({"type": "authentication_error", "message": "who?"}, EndpointMisused),
        ({"code": 400, "message": "too long"}, EndpointRefused),
        ({"code": "context_length_exceeded"}, EndpointRefused),
        ({"type": "invalid_request_error"}, EndpointRefused),
        ({"code": 429}, InferenceUnavailable),
        ({"type": "rate_limit_error"}, InferenceUnavailable),
        ({"type": "overloaded_error"}, InferenceUnavailable),
        ({"code": "E17", "message": "not found in the permission cache"}, InferenceUnavailable),
        ("rate limit exceeded", InferenceUnavailable),
        ({"message": "rate is fine, permission too"}, InferenceUnavailable),
    ],
)
@pytest.mark.parametrize("where", ["top", "choice"])
async def test_an_error_object_in_an_answer_counts_as_the_status_that_it_names(
    error: object, kind: type[SpadeError], where: str
) -> None:
    body = msgspec.json.encode({"error": error}) if where == "top" else choice("error", error=error)
    async with (
        fake_endpoint(play(Raw(body))) as fake,
        open_endpoint(settings(fake, tries=2, price_out=1.0)) as endpoint,
    ):
        with pytest.raises(kind):
            await endpoint.write(["x"], sampling=SAMPLING)
        assert len(fake.bodies) == (2 if kind is InferenceUnavailable else 1)
        assert endpoint.statistics()["cost_unseen"] == 0.0


async def test_no_account_of_the_environment_reaches_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "mine")
    async with fake_endpoint(play(Say("x"))) as fake, open_endpoint(settings(fake)) as endpoint:
        await endpoint.write(["x"], sampling=SAMPLING)
    (headers,) = fake.headers
    assert "mine" not in " ".join(headers.values())


async def test_starts_are_spaced() -> None:
    pace, starts = Pace(60 / 0.02), []

    async def one() -> None:
        await pace.turn()
        starts.append(time.monotonic())

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(one)
    assert max(starts) - min(starts) >= 3 * 0.02 - 0.005
    await Pace(0).turn()


def test_a_key_that_is_not_set_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        key_of(Settings(base_url="http://x", key_env="NO_SUCH_KEY"))
    assert key_of(Settings(base_url="http://x")) == ""


NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("200.5", 200.5),
        ("99999", 900.0),
        (None, 0.0),
        ("soon", 0.0),
        ("-1", 0.0),
        ("nan", 0.0),
        (formatdate(NOW + 90, usegmt=True), 90.0),
        (formatdate(NOW - 90, usegmt=True), 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
    ],
)
def test_the_delay_that_is_asked_for(header: str | None, seconds: float) -> None:
    assert module._asked_delay(header, NOW) == seconds


async def test_a_busy_endpoint_is_left_alone_by_every_request() -> None:
    """A refusal of one request holds for those beside it."""
    busy = Raw(b"slow down", 429, {"Retry-After": "0.2"})
    async with fake_endpoint(play(busy, Say("now"))) as fake, open_endpoint(settings(fake)) as endpoint:
        first = anyio.Event()
        fake.script = lambda _: (first.set(), busy)[1] if not first.is_set() else Say("now")
        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(endpoint.write, ["a"], sampling=SAMPLING))
            await first.wait()
            while not endpoint.statistics().get("http_429"):
                await anyio.lowlevel.checkpoint()
            await endpoint.write(["b"], sampling=SAMPLING)
            assert time.monotonic() - started >= 0.2
        assert endpoint.statistics()["http_429"] == 1
