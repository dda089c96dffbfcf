"""The designer role on the bus."""

from __future__ import annotations

import hashlib
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from designer_stage import BAD, GOOD, Policy, Stage, quick, tokens, verdict_on
from role_fakes import COUNTER, STOP, FakeChat
from scenes.small_run import ticket

from bus.messages import DesignFailed, DesignRejected, EnvironmentReady
from engine.inference.completion import InferenceUnavailable
from roles.designer.review import title
from sandbox import SandboxUnavailable


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


async def test_a_ticket_becomes_an_environment(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(GOOD))
    fact = await stage.ready()
    assert (fact.design, fact.cohort, fact.slot, fact.attempt, fact.skill) == ("d1", 3, 1, 0, "Logic")
    assert fact.source.strip() == COUNTER.strip()
    assert fact.environment == hashlib.sha256(fact.source.encode()).hexdigest()
    assert fact.hint == "count upwards"
    assert fact.finding.title == "count from 2"
    assert (fact.finding.trivial_win_rate, fact.finding.degenerate) == (0.25, False)
    assert (fact.family, fact.difficulty) == (None, None)
    (held,) = await stage.held()
    assert (held.design, held.cohort, held.attempt, held.valid, held.skill) == ("d1", 3, 0, True, "Logic")
    (segment,) = held.segments
    assert tokens(segment, trained=True) == [*FakeChat().encode(GOOD), STOP]
    assert tokens(segment, trained=False) == stage.pool.calls[0]["prompt"]
    assert stage.pool.calls[1]["sampling"] == stage.context.config.designer.hint_sampling


async def test_rejected_attempts_are_facts_and_held_tokens(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(BAD, GOOD))
    rejected, ready = await stage.answers(DesignRejected, EnvironmentReady)
    assert (rejected.attempt, rejected.rung) == (0, "load")
    assert "class Nothing" in rejected.source
    assert ready.attempt == 1
    assert [(held.attempt, held.valid) for held in await stage.held()] == [(0, False), (1, True)]
    statistics = stage.designer.statistics()
    assert (statistics["attempts"], statistics["accepted"], statistics["rejected_load"]) == (2, 1, 1)


async def test_a_ticket_without_a_valid_program_fails(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(BAD))
    *_, failed = await stage.answers(DesignRejected, DesignRejected, DesignFailed)
    assert (failed.failure, failed.attempts) == ("policy", 2)
    assert len(await stage.held()) == 2


async def test_dropped_attempts_are_not_held(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(BAD, GOOD), invalid="drop")
    await stage.answer(2)
    assert [(held.attempt, held.valid) for held in await stage.held()] == [(1, True)]


async def test_hints_are_asked_for_again_and_may_be_missing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(GOOD, hints=("\\boxed{2}", "", "from the start upwards")), hint_attempts=3)
    fact = await stage.ready()
    assert fact.hint == "from the start upwards"
    stage = Stage(tmp_path, Policy(GOOD, hints=("\\boxed{2}",)), hint_attempts=3)
    fact = await stage.ready()
    assert fact.hint is None
    assert len(stage.policy.hint_prompts) == 3
    assert stage.designer.statistics()["without_hint"] == 1


async def test_equal_programs_are_accepted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(GOOD))
    await stage.answers(*[EnvironmentReady] * 3, to=[ticket("d1"), ticket("d2"), ticket("d3", cohort=4)])
    assert stage.designer.statistics()["accepted"] == 3


async def test_an_infrastructure_fault_hands_the_ticket_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(InferenceUnavailable("gone"), GOOD))
    stage.sandbox.faults.append(SandboxUnavailable("gone"))
    fact = await stage.ready()
    assert fact.attempt == 0
    assert stage.designer.statistics()["handed_back"] == 2


async def test_a_lasting_infrastructure_fault_fails_the_ticket(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(InferenceUnavailable("no server")))
    (fact,) = await stage.answers(DesignFailed)
    assert fact.failure == "infra"
    assert "no server" in fact.reason


async def test_a_redelivered_ticket_resumes_after_its_published_attempts(tmp_path: Path) -> None:
    """The first attempt was rejected and published, then two lives met a fault; each attempt counts once."""
    gone = InferenceUnavailable("gone")
    stage = Stage(tmp_path, Policy(BAD, gone, gone, GOOD))
    await stage.answers(DesignRejected, EnvironmentReady)
    assert len(stage.policy.design_prompts) == 4
    assert [(held.attempt, held.valid) for held in await stage.held()] == [(0, False), (1, True)]
    found = stage.designer.statistics()
    names = ("handed_back", "attempts", "rejected_load", "accepted")
    assert [found[name] for name in names] == [2, 2, 1, 1]


async def test_documents_and_memory_reach_the_prompt_and_survive_a_restart(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(3):
        (corpus / f"doc{number}.txt").write_text(f"document number {number}")
    stage = Stage(tmp_path, Policy(GOOD), corpus=f"dir:{corpus}", attempts=1)
    ready = await stage.ready()
    (held,) = await stage.held()
    assert ready.document == held.document
    assert (corpus / ready.document).read_text() in stage.policy.design_prompts[0]
    await stage.bus.publish(verdict_on(ready))

    again = Stage(tmp_path, Policy(GOOD), bus=stage.bus, corpus=f"dir:{corpus}", attempts=1)
    facts = await again.answer(3, ticket("d2", number=1), ticket("d3", number=2))
    assert len({fact.document for fact in facts}) == 3
    assert all("three times" in prompt for prompt in again.policy.design_prompts)
    assert all("30 points more" in prompt for prompt in again.policy.design_prompts)
    assert again.designer.statistics()["memory_records"] == 1


async def test_memory_grows_while_at_work_and_can_be_switched_off(tmp_path: Path) -> None:
    for memory in (True, False):
        stage = Stage(tmp_path, Policy(GOOD), memory=memory)
        ready = await stage.ready()
        stage = Stage(tmp_path, stage.policy, bus=stage.bus, memory=memory)
        async with stage.at_work():
            await stage.bus.publish(verdict_on(ready))
            with anyio.fail_after(5):
                while memory and not stage.designer.statistics()["memory_records"]:
                    await anyio.lowlevel.checkpoint()
            await stage.bus.publish(ticket("d2"))
            with anyio.fail_after(5):
                async with stage.bus.follow("EVENT", tails=("event.designer.ready.*",)) as records:
                    while (await anext(records)).message.design != "d2":
                        pass
        assert ("three times" in stage.policy.design_prompts[-1]) is memory


@pytest.mark.parametrize(
    ("observation", "line"), [("\n  one \n two", "one"), ("", ""), ("x" * 500, "x" * 120)]
)
def test_title(observation: str, line: str) -> None:
    assert title(observation) == line
