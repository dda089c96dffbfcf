"""The designer role on the bus."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from role_fakes import COUNTER, STOP, FakeChat, FakePool, FakeSandbox, make_config, make_context
from scenes.memory_bus import MemoryBus

from bus.messages import (
    DesignFailed,
    DesignRejected,
    DesignTicket,
    EnvironmentReady,
    EnvironmentScored,
    HeldDesign,
    Message,
)
from engine.config import DesignerConfig as DesignerConfig
from engine.config import SamplingConfig
from engine.inference.completion import InferenceUnavailable
from roles import work_loop
from roles.designer import role as designer_role
from roles.designer.review import title
from roles.designer.role import DesignerRole
from sandbox import SandboxUnavailable, Verdict

GOOD = f"Here it is.\n```python\n{COUNTER}```\n"
BAD = "```python\nclass Nothing: pass\n```"


def verdict(rung: str = "", reason: str = "") -> Verdict:
    return Verdict(
        ok=not rung,
        rung=rung or "accepted",
        reason=reason,
        trivial_win_rate=0.25,
        first_observations=("\n count from 2\nmore", "count from 3"),
    )


class FakeValidator:
    """Accepts programs with an Env class."""

    def __init__(self, sandbox: FakeSandbox, *_: Any, **__: Any) -> None:
        self._sandbox = sandbox

    async def validate(self, source: str, **_: Any) -> Verdict:
        await anyio.lowlevel.checkpoint()
        if self._sandbox.faults:
            raise self._sandbox.faults.pop(0)
        return verdict() if "Env:" in source else verdict("load", "no class whose name ends in Env")


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_loop, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(designer_role, "Validator", FakeValidator)


def make_ticket(design: str = "d1", **fields: Any) -> DesignTicket:
    values: dict[str, Any] = {
        "design": design,
        "cohort": 3,
        "slot": 1,
        "skill": "Logic",
        "seed": 11,
        "attempts": 2,
        "target": 0.5,
        "round": 0,
        **fields,
    }
    return DesignTicket(**values)


class Policy:
    """Answers design prompts from a list (the last one for ever), hint prompts with ``hints``."""

    def __init__(
        self, *designs: str | Exception, hints: tuple[str | Exception, ...] = ("count upwards",)
    ) -> None:
        self.designs, self.hints = list(designs), list(hints)
        self.design_prompts: list[str] = []
        self.hint_prompts: list[str] = []

    def __call__(self, text: str, _: int) -> str | Exception:
        if "<program>" in text:
            self.hint_prompts.append(text)
            return self.hints.pop(0) if len(self.hints) > 1 else self.hints[0]
        self.design_prompts.append(text)
        return self.designs.pop(0) if len(self.designs) > 1 else self.designs[0]


class Stage:
    """A designer at work, its bus and its fakes."""

    def __init__(
        self, tmp_path: Path, policy: Policy, *, bus: MemoryBus | None = None, **designer: Any
    ) -> None:
        self.bus = bus or MemoryBus(run="test", role="scorer", instance="s0")
        self.policy, self.pool, self.sandbox = policy, FakePool(policy), FakeSandbox()
        settings: dict[str, Any] = {"concurrency": 4, "sampling": SamplingConfig(max_tokens=2000), **designer}
        config = make_config(designer=DesignerConfig(**settings))
        self.context = make_context(
            self.bus.peer("designer", "x"), config, tmp_path, pool=self.pool, sandbox=self.sandbox
        )
        self.designer = DesignerRole(self.context)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.designer.run)
            yield
            self.context.draining.set()

    async def answer(self, count: int, *tickets: DesignTicket) -> list[Message]:
        """Work until ``count`` facts about designs are there, return them."""
        await self.bus.publish_all(tickets or [make_ticket()])
        found: list[Message] = []
        async with self.at_work(), self.bus.follow("EVENT", tails=("event.designer.>",)) as records:
            with anyio.fail_after(10):
                async for record in records:
                    found.append(record.message)
                    if len(found) == count:
                        break
        assert (await self.bus.stream_info("TASK")).messages == 0
        return found

    async def held(self) -> list[HeldDesign]:
        return [record.message async for record in self.bus.replay("DESIGN")]  # type: ignore[misc]


async def test_a_ticket_becomes_an_environment(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(GOOD))
    (fact,) = await stage.answer(1)
    assert isinstance(fact, EnvironmentReady)
    assert (fact.design, fact.cohort, fact.slot, fact.attempt, fact.skill) == ("d1", 3, 1, 0, "Logic")
    assert fact.source.strip() == COUNTER.strip()
    assert fact.environment == hashlib.sha256(fact.source.encode()).hexdigest()
    assert fact.hint == "count upwards"
    assert fact.title == "count from 2"
    assert (fact.trivial_win_rate, fact.degenerate) == (0.25, False)
    assert (fact.family, fact.difficulty) == (None, None)
    (held,) = await stage.held()
    assert (held.design, held.cohort, held.attempt, held.valid, held.skill) == ("d1", 3, 0, True, "Logic")
    (segment,) = held.segments
    mask = np.frombuffer(segment.mask, np.uint8).astype(bool)
    tokens = np.frombuffer(segment.tokens, "<i4")
    assert tokens[mask].tolist() == [*FakeChat().encode(GOOD), STOP]
    assert tokens[~mask].tolist() == stage.pool.calls[0]["prompt"]
    assert stage.pool.calls[1]["sampling"] == stage.context.config.designer.hint_sampling


async def test_rejected_attempts_are_facts_and_held_tokens(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(BAD, GOOD))
    rejected, ready = await stage.answer(2)
    assert isinstance(rejected, DesignRejected)
    assert (rejected.attempt, rejected.rung) == (0, "load")
    assert "class Nothing" in rejected.source
    assert isinstance(ready, EnvironmentReady)
    assert ready.attempt == 1
    assert [(held.attempt, held.valid) for held in await stage.held()] == [(0, False), (1, True)]
    assert stage.pool.calls[0]["seed"] != stage.pool.calls[1]["seed"]
    statistics = stage.designer.statistics()
    assert (statistics["attempts"], statistics["accepted"], statistics["rejected_load"]) == (2, 1, 1)


async def test_a_ticket_without_a_valid_program_fails(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(BAD))
    facts = await stage.answer(3)
    assert [type(fact) for fact in facts] == [DesignRejected, DesignRejected, DesignFailed]
    failed = facts[-1]
    assert isinstance(failed, DesignFailed)
    assert (failed.failure, failed.attempts) == ("policy", 2)
    assert len(await stage.held()) == 2


async def test_dropped_attempts_are_not_held(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(BAD, GOOD), invalid="drop")
    await stage.answer(2)
    assert [(held.attempt, held.valid) for held in await stage.held()] == [(1, True)]


@pytest.mark.parametrize(("reply", "reason"), [(GOOD + "x" * 2000, "cut"), ("", "no program")])
async def test_cut_and_empty_replies_fail_at_extraction(tmp_path: Path, reply: str, reason: str) -> None:
    stage = Stage(tmp_path, Policy(reply))
    (rejected, *_) = await stage.answer(2, make_ticket(attempts=1))
    assert isinstance(rejected, DesignRejected)
    assert rejected.rung == "extract"
    assert reason in rejected.reason


async def test_hints_are_asked_for_again_and_may_be_missing(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(GOOD, hints=("\\boxed{2}", "", "from the start upwards")), hint_attempts=3)
    (fact,) = await stage.answer(1)
    assert isinstance(fact, EnvironmentReady)
    assert fact.hint == "from the start upwards"
    stage = Stage(tmp_path, Policy(GOOD, hints=("\\boxed{2}",)), hint_attempts=3)
    (fact,) = await stage.answer(1)
    assert isinstance(fact, EnvironmentReady)
    assert fact.hint is None
    assert len(stage.policy.hint_prompts) == 3
    assert stage.designer.statistics()["without_hint"] == 1


async def test_equal_programs_of_a_cohort_are_accepted_and_counted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(GOOD))
    facts = await stage.answer(3, make_ticket("d1"), make_ticket("d2"), make_ticket("d3", cohort=4))
    assert [type(fact) for fact in facts] == [EnvironmentReady] * 3
    assert stage.designer.statistics()["duplicates"] == 1


async def test_an_infrastructure_fault_hands_the_ticket_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(InferenceUnavailable("gone"), GOOD))
    stage.sandbox.faults.append(SandboxUnavailable("gone"))
    (fact,) = await stage.answer(1)
    assert isinstance(fact, EnvironmentReady)
    assert fact.attempt == 0
    assert stage.designer.statistics()["handed_back"] == 2


async def test_a_lasting_infrastructure_fault_fails_the_ticket(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(InferenceUnavailable("no server")))
    (fact,) = await stage.answer(1)
    assert isinstance(fact, DesignFailed)
    assert fact.failure == "infra"
    assert "no server" in fact.reason


async def test_a_redelivered_ticket_resumes_its_published_attempts(tmp_path: Path) -> None:
    """The first attempt was rejected and published, the second met a fault: the third life goes on there."""
    policy = Policy(BAD, InferenceUnavailable("gone"), GOOD)
    stage = Stage(tmp_path, policy)
    facts = await stage.answer(2)
    assert [type(fact) for fact in facts] == [DesignRejected, EnvironmentReady]
    assert len(policy.design_prompts) == 3
    assert [(held.attempt, held.valid) for held in await stage.held()] == [(0, False), (1, True)]


async def test_tokens_that_are_held_are_not_written_anew(tmp_path: Path) -> None:
    """Ended between the tokens and the fact: the next life tells of the tokens that are held."""
    first = Stage(tmp_path, Policy(GOOD, hints=(InferenceUnavailable("gone"),)))
    (fact,) = await first.answer(1)
    assert isinstance(fact, DesignFailed)
    assert fact.failure == "infra"
    assert len(first.policy.design_prompts) == 1
    (held,) = await first.held()

    other = COUNTER.replace("count from", "begin with")
    second = Stage(tmp_path, Policy(f"```python\n{other}```"))
    await second.bus.publish(held)
    (ready,) = await second.answer(1)
    assert isinstance(ready, EnvironmentReady)
    assert ready.source.strip() == COUNTER.strip()
    assert second.policy.design_prompts == []
    assert await second.held() == [held]


async def test_documents_and_memory_reach_the_prompt_and_survive_a_restart(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(3):
        (corpus / f"doc{number}.txt").write_text(f"document number {number}")
    stage = Stage(tmp_path, Policy(GOOD), corpus=f"dir:{corpus}", attempts=1)
    (ready,) = await stage.answer(1)
    assert isinstance(ready, EnvironmentReady)
    (held,) = await stage.held()
    assert ready.document == held.document
    assert (corpus / ready.document).read_text() in stage.policy.design_prompts[0]
    await stage.bus.publish(scored(ready))

    again = Stage(tmp_path, Policy(GOOD), bus=stage.bus, corpus=f"dir:{corpus}", attempts=1)
    facts = await again.answer(3, make_ticket("d2", number=1), make_ticket("d3", number=2))
    documents = {fact.document for fact in facts if isinstance(fact, EnvironmentReady)}
    assert len(documents) == 3
    assert all("three times" in prompt for prompt in again.policy.design_prompts)
    assert all("30 points more" in prompt for prompt in again.policy.design_prompts)
    assert again.designer.statistics()["memory_records"] == 1


async def test_memory_grows_while_at_work_and_can_be_switched_off(tmp_path: Path) -> None:
    for memory in (True, False):
        stage = Stage(tmp_path, Policy(GOOD), memory=memory)
        (ready,) = await stage.answer(1)
        assert isinstance(ready, EnvironmentReady)
        stage = Stage(tmp_path, stage.policy, bus=stage.bus, memory=memory)
        async with stage.at_work():
            await stage.bus.publish(scored(ready))
            with anyio.fail_after(5):
                while memory and not stage.designer.statistics()["memory_records"]:
                    await anyio.lowlevel.checkpoint()
            await stage.bus.publish(make_ticket("d2"))
            with anyio.fail_after(5):
                async with stage.bus.follow("EVENT", tails=("event.designer.ready",)) as records:
                    async for record in records:
                        if isinstance(record.message, EnvironmentReady) and record.message.design == "d2":
                            break
        assert ("three times" in stage.policy.design_prompts[-1]) is memory


def scored(ready: EnvironmentReady) -> EnvironmentScored:
    return EnvironmentScored(
        design=ready.design,
        cohort=ready.cohort,
        environment=ready.environment,
        skill=ready.skill,
        document=ready.document,
        round=4,
        plays=8,
        hinted_plays=8,
        win=0.5,
        win_low=0.3,
        win_high=0.7,
        hinted=0.8,
        regret=0.3,
        regret_low=0.1,
        regret_high=0.5,
        plateau=1.0,
        reward=1.0,
        advantage=0.5,
        state="frontier",
    )


@pytest.mark.parametrize(
    ("observation", "line"), [("\n  one \n two", "one"), ("", ""), ("x" * 500, "x" * 120)]
)
def test_title(observation: str, line: str) -> None:
    assert title(observation) == line
