"""The designer role: flags, near-duplicates and hints of accepted programs, as facts on the bus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from designer_stage import GOOD, Policy, Stage, quick, verdict_on
from role_fakes import COUNTER, FakeChat, FakePool, FakeSandbox, make_config
from scenes.judged_programs import judged
from scenes.small_run import ticket

from bus.messages import DesignRejected, EnvironmentReady, WaysToWin
from engine.config import DesignerConfig, SamplingConfig
from engine.errors import ConfigError
from engine.inference.endpoint import EndpointRefused
from engine.records.archive import ProgramArchive
from roles.designer import role as designer_role
from roles.designer.hint import HintWriter
from roles.designer.role import hint_writer
from sandbox import Check, Rejected, Verdict

HEAD = '"""\ntitle: Counting\nskill: Optimization\nidea: count\nwin: three in order\n"""\nimport math\n'
DECLARED = HEAD + COUNTER
OTHER = f"```python\n{DECLARED}```"
LOGIC = OTHER.replace("Optimization", "Logic")


class Judge:
    """Plays programs in this process, and climbs the designer's own rungs."""

    def __init__(self, sandbox: FakeSandbox, *_: Any, checks: Sequence[Check]) -> None:
        self._checks = checks

    async def validate(self, source: str, *, ticket: Any, max_turns: int) -> Verdict:
        verdict = judged(source, turns=max_turns)
        try:
            for check in self._checks:
                verdict = await check(source, ticket, verdict)
        except Rejected as rejected:
            return msgspec.structs.replace(verdict, ok=False, rung=rejected.rung, reason=rejected.reason)
        return verdict


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch, Judge)


def test_a_sentence_model_that_is_not_there_is_said_before_the_start() -> None:
    config = make_config(designer=DesignerConfig(similarity="models/nowhere"))
    with pytest.raises(ConfigError, match="no sentence model at models/nowhere"):
        designer_role.DesignerRole.check(config)


async def test_what_the_program_declares_is_told(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(LOGIC))
    ready = await stage.ready()
    assert ready.finding.summary == "Counting; count; three in order"
    found = ready.finding
    assert (found.flag, found.flag_reason, found.near, found.similarity) == ("", "", "", None)
    assert ProgramArchive(tmp_path).get(ready.environment) == ready.source


async def test_a_flag_is_part_of_the_fact_or_a_rejection(tmp_path: Path) -> None:
    ready = await Stage(tmp_path, Policy(OTHER)).ready()
    assert ready.finding.flag == "off_ticket"
    assert "Optimization" in ready.finding.flag_reason
    stage = Stage(tmp_path, Policy(OTHER, LOGIC), conformity="reject")
    rejected, _ = await stage.answers(DesignRejected, EnvironmentReady)
    assert (rejected.rung, rejected.source.strip()) == ("off_ticket", DECLARED.strip())
    assert [(held.attempt, held.valid) for held in await stage.held()] == [(0, False), (1, True)]
    statistics = stage.designer.statistics()
    assert (statistics["rejected_off_ticket"], statistics["conformity_off_ticket"]) == (1, 1)


async def test_a_near_copy_of_a_remembered_program(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(LOGIC))
    first = await stage.ready()
    again = Stage(tmp_path, Policy(LOGIC), bus=stage.bus)
    _, second = await again.answers(EnvironmentReady, EnvironmentReady, to=[ticket("d2")])
    assert second.finding.near == first.environment
    assert second.finding.similarity == pytest.approx(1.0)
    assert again.designer.statistics()["near_duplicates"] == 1
    await stage.bus.publish(verdict_on(first))
    strict = Stage(tmp_path, Policy(LOGIC, GOOD), bus=stage.bus, duplicates="reject", memory_duplicate=0.99)
    kinds = (EnvironmentReady, EnvironmentReady, DesignRejected, EnvironmentReady)
    *_, rejected, _ = await strict.answers(*kinds, to=[ticket("d3")])
    assert rejected.rung == "duplicate"


class FakeWriter:
    def __init__(self, *answers: str | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []

    async def write(self, turns: Any, *, sampling: SamplingConfig, seed: int | None = None) -> Any:
        self.asked.append(list(turns))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(text=answer, finish="stop")


def writer(pool: Any, external: Any = None, attempts: int = 3) -> HintWriter:
    chat: Any = FakeChat()
    by = "external" if external else "self"
    designer = DesignerConfig(
        prompt="full", hint_writer=by, hint_attempts=attempts, hint_sampling=SamplingConfig(max_tokens=200)
    )
    return hint_writer(make_config(designer=designer), chat, pool, external)


async def test_refused_hints_are_asked_for_again_and_counted() -> None:
    replies = iter(["the answer is 42", "A number from 1 to 99.", "Halve what is left."])
    pool = FakePool(lambda *_: next(replies))
    hints = writer(pool)
    wins = WaysToWin(
        firsts=("A number from 1 to 99.",), alone=("17", "42", "63"), actions=tuple(map(str, range(100)))
    )
    hint = await hints.write("class A: ...", design="d", attempt=0, wins=wins)
    assert hint == "Halve what is left."
    assert hints.statistics() == {"hint_gives_away": 1, "hint_adds_nothing": 1}
    assert len(pool.calls) == 3


async def test_a_writer_is_asked_in_text_until_a_hint_will_do() -> None:
    endpoint = FakeWriter("play \\boxed{4}", "Hint: Halve what is left.")
    pool = FakePool(lambda *_: pytest.fail("the policy was asked"))
    hint = await writer(pool, endpoint).write("class A: ...", design="d", attempt=0)
    assert hint == "Halve what is left."
    assert endpoint.asked[0] == endpoint.asked[1]
    assert "class A: ..." in endpoint.asked[0][0]


async def test_an_endpoint_that_refuses_leaves_the_design_without_a_hint() -> None:
    hints = writer(FakePool(lambda *_: ""), FakeWriter(EndpointRefused("no", where="here")))
    assert await hints.write("class A: ...", design="d", attempt=0) is None
    assert hints.statistics() == {"hint_refused": 1}
