"""The designer role and its endpoint: refusals, mistakes of the recipe, money, and hints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import pytest
from designer_stage import GOOD, Policy, Stage, quick
from role_fakes import FakeChat, FakePool, make_config
from scenes.endpoint_fake import Behaviour, FakeEndpoint, Raw, Say, fake_endpoint
from scenes.memory_bus import MemoryBus
from scenes.small_run import ticket

from bus.access import ROLES
from bus.messages import DesignFailed, DesignRejected, EnvironmentReady
from engine.config import DesignerConfig, EndpointConfig, SamplingConfig
from engine.errors import SpadeError
from engine.inference import endpoint as endpoint_module
from engine.inference.completion import InferenceUnavailable
from engine.inference.endpoint import EndpointMisused
from engine.inference.spending import EndpointSpent
from roles.designer.authors import account
from roles.designer.role import hint_writer


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "_FIRST_DELAY", 0.001)
    quick(monkeypatch)


def external(fake: FakeEndpoint, **fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"model": "m", "context_tokens": 60_000, "tries": 2, **fields}
    return {"kind": "external", "external": EndpointConfig(base_url=fake.url, **values)}


def one_after_the_other(*behaviours: Behaviour) -> Any:
    rest = list(behaviours)
    return lambda _: rest.pop(0) if len(rest) > 1 else rest[0]


COST = (100 + 20) * 1000 / 1e6
"""The cost of an answer of the fake at 1000 per million tokens."""
DECLINED = b'{"choices": [{"message": {"content": null, "refusal": "I will not"}, "finish_reason": "stop"}]}'
FILTERED = b'{"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}'


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (Raw(b'{"error": "context too long"}', 400), "HTTP 400: .*context too long"),
        (Raw(b"too large", 413), "HTTP 413: too large"),
        (Raw(DECLINED), "I will not"),
        (Raw(FILTERED), "content filter"),
    ],
)
async def test_a_refusal_is_a_rejected_attempt_with_its_reason(
    refusal: Behaviour, reason: str, tmp_path: Path
) -> None:
    async with fake_endpoint(one_after_the_other(refusal, Say(GOOD))) as fake:
        stage = Stage(tmp_path, Policy(GOOD), **external(fake))
        rejected, ready = await stage.answers(DesignRejected, EnvironmentReady)
    assert (rejected.rung, rejected.attempt, rejected.source) == ("refused", 0, "")
    assert re.search(reason, rejected.reason)
    assert rejected.prompt.startswith("design_full")
    assert ready.attempt == 1
    statistics = stage.designer.statistics()
    assert (statistics["rejected_refused"], statistics.get("handed_back", 0)) == (1, 0)
    assert statistics["external_refused"] == 1


async def test_a_ticket_that_is_refused_to_the_end_has_failed(tmp_path: Path) -> None:
    async with fake_endpoint(lambda _: Raw(b"filtered", 400)) as fake:
        stage = Stage(tmp_path, Policy(GOOD), **external(fake))
        facts = await stage.answers(*[DesignRejected] * 3, DesignFailed, to=[ticket(attempts=3)])
        assert facts[-1].failure == "policy"


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_mistake_of_the_recipe_ends_the_run_with_its_remedy(status: int, tmp_path: Path) -> None:
    async with fake_endpoint(lambda _: Raw(b"no", status)) as fake:
        with pytest.raises(ExceptionGroup) as caught:
            await Stage(tmp_path, Policy(GOOD), **external(fake)).answer(1)
        assert len(fake.bodies) == 1
    error = innermost(caught.value)
    assert isinstance(error, EndpointMisused)
    assert error.remedy


async def test_the_run_ends_when_its_money_is_spent_and_goes_on_with_more(tmp_path: Path) -> None:
    """Designs and hints are paid from one purse, over all lives of the run."""
    wire = MemoryBus(run="test", role="scorer", instance="s0")
    prices: dict[str, Any] = {"price_in": 1000.0, "price_out": 1000.0}
    async with fake_endpoint(lambda text: Say("count upwards" if "<program>" in text else GOOD)) as fake:
        poor: dict[str, Any] = {
            **external(fake, max_cost=6.0, **prices),
            "sampling": SamplingConfig(max_tokens=2000),
            "hint_sampling": SamplingConfig(max_tokens=200),
            "hint_writer": "external",
        }
        for _ in range(2):
            stage = Stage(tmp_path, Policy("never asked"), bus=wire, **poor)
            with pytest.raises(ExceptionGroup) as caught:
                await stage.answer(40, *(ticket(f"d{number}") for number in range(40)))
            error = innermost(caught.value)
            assert isinstance(error, EndpointSpent)
            assert "max_cost" in str(error)
            assert stage.designer.statistics()["external_spent"] <= 6.0
        asked = len(fake.bodies)
        sum_kept = await wire.state_get(account(poor["external"]))
        assert sum_kept is not None
        assert float(sum_kept[1]) == pytest.approx(asked * COST)
        assert 2 <= asked <= 6.0 / COST
        rich = poor | external(fake, max_cost=1000.0, **prices)
        stage = Stage(tmp_path, Policy("never asked"), bus=wire, **rich)
        async with stage.at_work(), wire.follow("EVENT", tails=("event.designer.ready.*",)) as facts:
            answered = set()
            with anyio.fail_after(60):
                while len(answered) < 40:
                    answered.add((await anext(facts)).message.design)
        lives, at_once = 2, 4
        assert len(fake.bodies) <= 2 * 40 + lives * at_once, "but for what was on its way at an end"


def test_a_designer_may_keep_its_account_on_a_broker_with_keys() -> None:
    """And of two models, or two endpoints, each has one of its own."""
    (allowed,) = ROLES["designer"].keys
    keys = {account(EndpointConfig(base_url=url, model=model)) for url in ("u", "v") for model in ("m", "n")}
    assert len(keys) == 4
    assert allowed.endswith(".*")
    assert all(key.startswith(allowed[:-1]) and key.count(".") == allowed.count(".") for key in keys)


async def test_a_hint_that_was_paid_for_is_not_bought_again(tmp_path: Path) -> None:
    """Ended between the hint and the fact: the next life tells of the hint that is held."""
    async with fake_endpoint(lambda text: Say("count upwards" if "<program>" in text else GOOD)) as fake:
        settings = {**external(fake), "hint_writer": "external"}
        first = Stage(tmp_path, Policy("never asked"), **settings)
        (told,) = await first.answer(1)
        held = await first.held()
        assert [(one.part, one.segments, one.text) for one in held] == [
            ("", (), GOOD),
            ("hint", (), "count upwards"),
        ]
        later = Stage(tmp_path, Policy("never asked"), **settings)
        await later.bus.publish_all(held)
        assert await later.answer(1) == [told]
        assert len(fake.bodies) == 2
        assert later.designer.statistics()["accepted"] == 1


async def test_designs_and_hints_share_one_endpoint(tmp_path: Path) -> None:
    """One pace and one count for both; a hint writer alone is counted too."""
    async with fake_endpoint(lambda text: Say("count upwards" if "<program>" in text else GOOD)) as fake:
        prices: dict[str, Any] = {"price_in": 10.0, "price_out": 100.0}
        both = Stage(tmp_path, Policy("never asked"), hint_writer="external", **external(fake, **prices))
        await both.answer(1)
        only = {**external(fake, **prices), "kind": "policy"}
        hints = Stage(tmp_path, Policy(GOOD), hint_writer="external", **only)
        await hints.answer(1)
    for stage, requests in ((both, 2), (hints, 1)):
        found = stage.designer.statistics()
        assert (found["external_requests"], found["external_answers"]) == (requests, requests)
        assert (found["external_tokens_in"], found["external_tokens_out"]) == (100 * requests, 20 * requests)
        assert found["external_cost"] == pytest.approx(requests * (100 * 10 + 20 * 100) / 1e6)


@pytest.mark.parametrize(("kind", "says"), [("full", "text game"), ("tools", "tools"), ("nano", "text game")])
async def test_an_endpoint_is_asked_for_a_hint_to_the_kind_of_program(kind: str, says: str) -> None:
    """Only a policy that was warm-started on it understands the nano prompt."""
    asked: list[str] = []

    class Writer:
        async def write(self, turns: Any, **_: Any) -> Any:
            asked.extend(turns)
            raise InferenceUnavailable("enough")

    chat: Any = FakeChat()
    pool: Any = FakePool(lambda *_: "")
    designer = DesignerConfig(prompt=kind, hint_writer="external", hint_attempts=1)
    writer = hint_writer(make_config(designer=designer), chat, pool, Writer())  # type: ignore[arg-type]
    with pytest.raises(InferenceUnavailable):
        await writer.write("class AEnv: ...", design="d", attempt=0)
    (text,) = asked
    assert says in text.splitlines()[0]
    assert "class AEnv: ..." in text


def innermost(error: BaseException) -> SpadeError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SpadeError), error
    return error
