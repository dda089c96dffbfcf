"""The budget of a run for an endpoint, against a real local server, with the sum on a bus."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from scenes.endpoint_fake import Behaviour, Hang, Raw, Say, fake_endpoint
from scenes.memory_bus import MemoryBus

from bus import BusUnavailable
from engine.config import EndpointConfig as Settings
from engine.config import SamplingConfig
from engine.inference import endpoint as module
from engine.inference.completion import InferenceUnavailable
from engine.inference.endpoint import open_endpoint
from engine.inference.spending import EndpointSpent, run_total

SAMPLING = SamplingConfig(max_tokens=200)
ANSWER = (100 * 1000 + 20 * 10_000) / 1e6
"""The price of an answer of the fake: 100 tokens in, 20 out."""
MOST = 2.2
"""More than a request of this file reserves, less than two of them."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_DELAY", 0.001)


def settings(url: str, **fields: Any) -> Settings:
    values: dict[str, Any] = {"model": "m", "request_seconds": 5.0, "tries": 3, **fields}
    return Settings(base_url=url, price_in=1000.0, price_out=10_000.0, **values)


def bus() -> MemoryBus:
    return MemoryBus(run="t", role="designer", instance="x")


class Total:
    """The sum of a run, which cannot be reached while ``broken``."""

    def __init__(self) -> None:
        self.sum, self.broken = 0.0, False

    async def __call__(self, amount: float) -> float:
        if self.broken:
            raise BusUnavailable("the state bucket", 1.0)
        self.sum += amount
        return self.sum


async def test_nothing_is_asked_that_could_cost_more_than_is_left() -> None:
    async with fake_endpoint(lambda _: Say("x")) as fake:
        async with open_endpoint(settings(fake.url, max_cost=MOST + 2 * ANSWER)) as endpoint:
            for _ in range(3):
                await endpoint.write(["x"], sampling=SAMPLING)
            for _ in range(3):
                with pytest.raises(EndpointSpent, match=r"has spent 0\.90 .*Raise it and run the same"):
                    await endpoint.write(["x"], sampling=SAMPLING)
            statistics = endpoint.statistics()
        assert len(fake.bodies) == 3, "no request is made for a refusal"
    assert statistics["spent"] == pytest.approx(3 * ANSWER)
    assert statistics["left"] == pytest.approx(MOST - ANSWER)


async def test_requests_together_stay_below_the_limit() -> None:
    """Those that would not be covered wait until it is known what those before them cost."""
    gate, waiting = anyio.Event(), anyio.Event()
    outcomes: list[str] = []
    async with (
        fake_endpoint(lambda _: Say("x")) as fake,
        open_endpoint(settings(fake.url, max_cost=MOST + 2 * ANSWER)) as endpoint,
    ):
        post = endpoint._post

        async def held(*arguments: Any) -> bytes:
            waiting.set()
            await gate.wait()
            return await post(*arguments)

        endpoint._post = held  # type: ignore[method-assign]

        async def one() -> None:
            try:
                await endpoint.write(["x"], sampling=SAMPLING)
                outcomes.append("answered")
            except EndpointSpent:
                outcomes.append("spent")

        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(one)
            await waiting.wait()
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
            assert endpoint.statistics()["requests"] == 1
            gate.set()
        assert endpoint.statistics()["spent"] <= MOST + 2 * ANSWER
    assert sorted(outcomes) == ["answered"] * 3 + ["spent"] * 3


async def test_a_life_knows_what_those_before_it_have_spent() -> None:
    wire = bus()
    async with fake_endpoint(lambda _: Say("x")) as fake:
        for life in range(4):
            ledger = run_total(wire.peer("designer", f"host-{life}"), "designer.spent.e")
            limited = settings(fake.url, max_cost=MOST + 2 * ANSWER)
            async with open_endpoint(limited, ledger) as endpoint:
                if life < 3:
                    await endpoint.write(["x"], sampling=SAMPLING)
                else:
                    with pytest.raises(EndpointSpent):
                        await endpoint.write(["x"], sampling=SAMPLING)
                    assert endpoint.statistics()["cost"] == 0.0
        more = settings(fake.url, max_cost=10.0)
        async with open_endpoint(more, run_total(wire, "designer.spent.e")) as endpoint:
            await endpoint.write(["x"], sampling=SAMPLING)
            assert endpoint.statistics()["spent"] == pytest.approx(4 * ANSWER)


async def test_hosts_add_to_one_sum() -> None:
    wire = bus()
    totals = [run_total(wire.peer("designer", f"host-{n}"), "designer.spent.e") for n in range(4)]
    async with anyio.create_task_group() as tasks:
        for total in totals:
            for _ in range(5):
                tasks.start_soon(total, 0.25)
    assert await totals[0](0.0) == pytest.approx(5.0)


SILENT: dict[str, tuple[Behaviour, bool]] = {
    "no answer": (Hang(), True),
    "unreadable": (Raw(b"<html>"), True),
    "http_500": (Raw(b"oops", 500), False),
    "http_429": (Raw(b"slow down", 429), False),
}


@pytest.mark.parametrize(("fault", "counts"), SILENT.values(), ids=SILENT)
async def test_an_answer_that_never_came_may_have_been_charged(fault: Behaviour, counts: bool) -> None:
    seconds = 0.1 if isinstance(fault, Hang) else 5.0
    script: list[Behaviour] = [Say("x"), fault, fault]
    async with fake_endpoint(lambda _: script.pop(0)) as fake:
        limited = settings(fake.url, max_cost=100.0, tries=2, request_seconds=seconds)
        async with open_endpoint(limited) as endpoint:
            await endpoint.write(["x"], sampling=SAMPLING)
            with pytest.raises(InferenceUnavailable):
                await endpoint.write(["x"], sampling=SAMPLING)
            found = endpoint.statistics()
    assert found["cost"] == pytest.approx(ANSWER)
    assert (found["cost_unseen"] > 2 * ANSWER) == counts, "as much as was reserved"
    assert found["spent"] == pytest.approx(found["cost"] + found["cost_unseen"])


async def test_a_request_that_is_cancelled_is_entered() -> None:
    asked = anyio.Event()

    def script(_: str) -> Behaviour:
        asked.set()
        return Hang()

    spent = Total()
    async with (
        fake_endpoint(script) as fake,
        open_endpoint(settings(fake.url, max_cost=5.0), spent) as endpoint,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(partial(endpoint.write, ["x"], sampling=SAMPLING))
        await asked.wait()
        tasks.cancel_scope.cancel()
    assert spent.sum > 0


@pytest.mark.parametrize(
    "usage",
    [
        b"",
        b', "usage": null',
        b', "usage": {}',
        b', "usage": []',
        b', "usage": {"prompt_tokens": 0, "completion_tokens": 0}',
        b', "usage": {"prompt_tokens": null, "completion_tokens": "many"}',
        b', "usage": {"prompt_tokens": -9000000, "completion_tokens": -1}',
        b', "usage": {"prompt_tokens": 1e300, "completion_tokens": true}',
        b', "usage": {"prompt_tokens": 1000.0}',
    ],
)
async def test_an_endpoint_that_counts_nothing_is_estimated(usage: bytes) -> None:
    """Nor does a count that is none throw away an answer that is paid for, or give money back."""
    body = b'{"choices": [{"message": {"content": "' + b"a" * 300 + b'"}, "finish_reason": "stop"}]'
    script = Raw(body + usage + b"}")
    async with fake_endpoint(lambda _: script) as fake, open_endpoint(settings(fake.url)) as endpoint:
        await endpoint.write(["b" * 3000], sampling=SAMPLING)
        assert endpoint.statistics()["cost"] == pytest.approx(1.0 + 1.0, rel=0.1)


async def test_a_cost_that_could_not_be_recorded_is_still_owed() -> None:
    spent = Total()

    def script(_: str) -> Behaviour:
        spent.broken = True
        return Say("x")

    async with (
        fake_endpoint(script) as fake,
        open_endpoint(settings(fake.url, max_cost=50.0), spent) as endpoint,
    ):
        await endpoint.write(["x"], sampling=SAMPLING)
        assert spent.sum == 0.0
        spent.broken = False
        await endpoint.write(["x"], sampling=SAMPLING)
    assert spent.sum == pytest.approx(ANSWER), "the first; the second could not be recorded either"
