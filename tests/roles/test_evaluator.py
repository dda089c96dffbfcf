"""The evaluator role on the bus."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from role_fakes import COUNTER, FakePool, FakeSandbox, RoleStage, make_config, make_context
from scenes import plugins
from scenes.memory_bus import MemoryBus
from scenes.small_run import policy, ready, serving
from test_agenda import finished, trained

from bus.messages import EvaluationFinished
from engine import registry
from engine.config import AgentConfig, LearnerConfig, SamplingConfig, SuiteConfig
from engine.config import EvaluatorConfig as EvaluatorConfig
from engine.errors import ConfigError
from engine.inference.completion import InferenceUnavailable
from engine.lineage import Lineage, Version
from engine.nano import seeds
from roles import work_loop
from roles.evaluator.role import EvaluatorRole
from roles.evaluator.suites import load_suite
from sandbox import SandboxUnavailable

GUESS = """
class GuessEnv:
    def reset(self, seed):
        return "say 1"
    def step(self, action):
        return "over", float(action == "1"), True, False, {}
"""


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_loop, "_FIRST_DELAY", 0.01)


def guessing(text: str, call: int) -> str:
    """Right on the guess programs, wrong on the counters."""
    return "\\boxed{1}" if "say 1" in text else "\\boxed{99}"


class Stage(RoleStage):
    """An evaluator at work on two programs (one always won, one never), its bus and its fakes."""

    def __init__(
        self, tmp_path: Path, *, bus: MemoryBus | None = None, script: Any = guessing, **tables: Any
    ) -> None:
        programs = tmp_path / "programs"
        programs.mkdir(exist_ok=True)
        (programs / "counter.py").write_text(COUNTER)
        (programs / "guess.py").write_text(GUESS)
        suite = SuiteConfig(name="both", source=f"dir:{programs}", episodes=8)
        self.bus = bus or MemoryBus(run="test", role="server", instance="s0")
        self.pool, self.sandbox = FakePool(script), FakeSandbox()
        self.config = make_config(
            evaluator=EvaluatorConfig(**{"every": 10, "suites": (suite,), **tables}),
            agent=AgentConfig(concurrency=4, sampling=SamplingConfig(max_tokens=32), context_tokens=8192),
        )
        self.context = make_context(
            self.bus.peer("evaluator", "v0"), self.config, tmp_path, pool=self.pool, sandbox=self.sandbox
        )
        self.role = self.evaluator = EvaluatorRole(self.context)

    def use(self, **tables: Any) -> None:
        """Begin anew with other tables of the recipe."""
        self.config = msgspec.structs.replace(self.config, **tables)
        self.context = replace(self.context, config=self.config)
        self.role = self.evaluator = EvaluatorRole(self.context)

    async def facts(self, count: int) -> list[EvaluationFinished]:
        return await self.told(count, "event.evaluator.finished")


async def test_a_suite_is_played_at_the_step_that_is_served(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.at_work():
        await stage.bus.publish(serving(0))
        (fact,) = await stage.facts(1)
    assert (fact.suite, fact.step, fact.episodes) == ("both", 0, 8)
    assert fact.win == 0.5
    assert fact.stderr == pytest.approx(math.sqrt(8 * 0.25 / 7 / 8))
    assert fact.by_family == {"counter": 0.0, "guess": 1.0}
    assert (fact.version, fact.version_high) == (0, 0)
    assert stage.pool.most_busy <= 2
    assert {call["sampling"].max_tokens for call in stage.pool.calls} == {32}
    assert all("HINT" not in stage.pool._chat.decode(call["prompt"]) for call in stage.pool.calls)


async def test_it_uses_its_own_temperature(tmp_path: Path) -> None:
    stage = Stage(tmp_path, temperature=0.5)
    async with stage.at_work():
        await stage.bus.publish(serving(0))
        await stage.facts(1)
    assert {call["sampling"].temperature for call in stage.pool.calls} == {0.5}


async def test_every_tenth_step_and_the_last_each_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.at_work():
        for count, step in enumerate((0, 10, 20), start=1):
            stage.pool.version = step
            await stage.bus.publish(serving(step))
            await stage.facts(count)
        stage.pool.version = 23
        await stage.bus.publish(serving(23))
        await stage.bus.publish(trained(23, final=True))
        facts = await stage.facts(4)
    assert [fact.step for fact in facts] == [0, 10, 20, 23]
    assert len(stage.pool.calls) == 4 * 8


async def test_an_evaluation_is_not_repeated_by_the_next_life(tmp_path: Path) -> None:
    first = Stage(tmp_path)
    async with first.at_work():
        await first.bus.publish(serving(0))
        await first.facts(1)
    second = Stage(tmp_path, bus=first.bus)
    second.pool.version = 10
    async with second.at_work():
        await second.bus.publish(serving(10))
        facts = await second.facts(2)
    assert [fact.step for fact in facts] == [0, 10]
    assert len(second.pool.calls) == 8


@pytest.mark.parametrize("kept", [True, False], ids=["forks in the state", "forks in the facts"])
async def test_what_abandoned_weights_answered_is_played_again(tmp_path: Path, kept: bool) -> None:
    """Step 10 was evaluated, then the learner went back to 6; the evaluator hears of it when it starts."""
    stage = Stage(tmp_path)
    if kept:
        await stage.bus.state_put("lineage", msgspec.json.encode(Lineage().fork(1, 6)))
    await stage.bus.publish_all([finished("both", 0), finished("both", 10), policy(6, 1)])
    stage.pool.version = Version(1, 10).pack()
    async with stage.at_work():
        await stage.bus.publish(serving(10, fence=1))
        fact = (await stage.facts(3))[-1]
    assert (fact.step, fact.version) == (10, Version(1, 10).pack())


async def test_a_fork_in_the_middle_of_an_evaluation_makes_it_start_anew(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.pool.gate = anyio.Event()

    def abandoned(text: str, call: int) -> str:
        stage.pool.version = Version(0 if call < 8 else 1, 10).pack()
        return guessing(text, call)

    stage.pool.script = abandoned
    async with stage.at_work():
        await stage.bus.publish_all([finished("both", 0), serving(10)])
        with anyio.fail_after(5):
            while not stage.pool.busy:
                await anyio.lowlevel.checkpoint()
        await stage.bus.publish_all([policy(6, 1), serving(6, fence=1), serving(10, fence=1)])
        with anyio.fail_after(5):
            while stage.evaluator._agenda.serving != Version(1, 10):
                await anyio.lowlevel.checkpoint()
        stage.pool.gate.set()
        _, fact = await stage.facts(2)
    assert (fact.version, fact.version_high, fact.episodes) == (*[Version(1, 10).pack()] * 2, 8)


async def test_new_weights_in_the_middle_are_recorded(tmp_path: Path) -> None:
    low, high = Version(1, 10).pack(), Version(1, 11).pack()
    stage = Stage(tmp_path)

    def swapping(text: str, call: int) -> str:
        stage.pool.version = low if call < 3 else high
        return guessing(text, call)

    stage.pool.script = swapping
    async with stage.at_work():
        await stage.bus.publish(serving(10, fence=1))
        (fact,) = await stage.facts(1)
    assert (fact.step, fact.version, fact.version_high) == (10, low, high)


async def test_older_weights_than_announced_are_named_by_their_step(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.pool.version = Version(1, 7).pack()
    async with stage.at_work():
        await stage.bus.publish(serving(20))
        (fact,) = await stage.facts(1)
    assert (fact.step, fact.version) == (7, Version(1, 7).pack())


async def test_infrastructure_faults_are_tried_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.sandbox.faults += [SandboxUnavailable("gone")] * 3
    failing = iter([True, True])
    stage.pool.script = lambda text, call: (
        InferenceUnavailable("x") if next(failing, False) else guessing(text, call)
    )
    async with stage.at_work():
        await stage.bus.publish(serving(0))
        (fact,) = await stage.facts(1)
    assert (fact.episodes, fact.win) == (8, 0.5)


@pytest.mark.parametrize("earlier", [True, False], ids=["before its start", "beside it"])
async def test_an_evaluation_says_how_many_designs_repeat_its_programs(tmp_path: Path, earlier: bool) -> None:
    stage = Stage(tmp_path)
    designs = [ready("d1", source=f"# mine\n{COUNTER}"), ready("d2", source="class AEnv: ...")]
    if earlier:
        await stage.bus.publish_all(designs)
    async with stage.at_work():
        if not earlier:
            await stage.bus.publish_all(designs)
        await stage.bus.publish(serving(0))
        (fact,) = await stage.facts(1)
    assert fact.overlap == 1


async def test_a_drain_ends_an_evaluation_without_a_result(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.pool.gate = anyio.Event()
    async with stage.at_work():
        await stage.bus.publish(serving(0))
        with anyio.fail_after(5):
            while not stage.pool.busy:
                await anyio.lowlevel.checkpoint()
    assert [record async for record in stage.bus.replay("EVENT", tails=("event.evaluator.>",))] == []
    assert all(instance.closed for instance in stage.sandbox.instances)


def test_suites_are_the_same_at_every_evaluation(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    (suite,) = stage.config.evaluator.suites
    _, items = load_suite(suite, stage.config)
    assert items == load_suite(suite, stage.config)[1]
    assert len({item.name for item in items}) == 8
    assert len({(item.group, item.data.seed) for item in items}) == 8


def test_generated_suites() -> None:
    suite = SuiteConfig(name="mid", source="seeds:mid", episodes=12)
    _, items = load_suite(suite, make_config())
    assert len(items) == 12
    assert len({item.group for item in items}) > 1
    assert items == load_suite(suite, make_config())[1]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("seeds:impossible", "no held-out suite 'impossible'.*easy, mid, hard"),
        ("ftp:x", "no known scheme.*dir:.*seeds:"),
        ("aime-25:", "cannot be played: it has no data: name a file"),
        ("programs/", "no known scheme"),
        ("dir:", "no program"),
        ("dir:/no/such/place", "no program"),
    ],
)
def test_unknown_suites_are_refused_before_the_start(source: str, complaint: str) -> None:
    suites = (SuiteConfig(name="x", source=source),)
    with pytest.raises(ConfigError, match=f"(?s){complaint}") as caught:
        EvaluatorRole.check(make_config(evaluator=EvaluatorConfig(suites=suites)))
    assert caught.value.where == "evaluator.suites: x"


SUITE = """
from engine.evals.suite import Item, Outcome, Suite

class Puzzles(Suite):
    def __init__(self, argument):
        self.argument = argument

    def items(self, count, seed):
        return [Item(name=str(index), group=self.argument) for index in range(count)]

    async def play(self, item, seat):
        reply = await seat.ask([f"say {item.name}"])
        return Outcome(score=float(reply.boxed == item.name))

def puzzles(argument, config):
    return Puzzles(argument)
"""


def test_a_suite_of_another_package_is_loaded_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"spade.suites/puzzles": "suites:puzzles", "spade.suites/broken": "absent:suite"}
    monkeypatch.syspath_prepend(str(plugins.install(tmp_path, "guest_suites", {"suites": SUITE}, points)))
    try:
        _, items = load_suite(SuiteConfig(name="own", source="puzzles:Chess", episodes=3), make_config())
        assert [(item.group, item.name) for item in items] == [("Chess", str(n)) for n in range(3)]
        with pytest.raises(ConfigError, match=r"guest_suites\.absent:suite\) cannot be imported"):
            load_suite(SuiteConfig(name="own", source="broken:x"), make_config())
        with pytest.raises(ConfigError, match=r"begin with .*broken:.*puzzles:.*seeds:"):
            load_suite(SuiteConfig(name="own", source="chess:x"), make_config())
    finally:
        registry.registered.cache_clear()


async def test_a_suite_of_another_package_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of the documentation beside a suite of programs, at two versions."""
    example = Path(__file__).parents[2] / "docs" / "examples" / "sums"
    monkeypatch.syspath_prepend(str(plugins.install_example(tmp_path / "site", example)))
    try:
        stage = Stage(tmp_path)
        (both,) = stage.config.evaluator.suites
        sums = SuiteConfig(name="sums", source="sums:small", episodes=6)
        stage.use(evaluator=EvaluatorConfig(every=10, suites=(both, sums)))

        def answer(text: str, call: int) -> str:
            numbers = re.findall(r"How much is (\d+) and (\d+)", text)
            return f"\\boxed{{{sum(map(int, numbers[-1]))}}}" if numbers else guessing(text, call)

        stage.pool.script = answer
        async with stage.at_work():
            await stage.bus.publish(serving(0))
            await stage.facts(2)
            stage.pool.version = 10
            await stage.bus.publish(serving(10))
            facts = await stage.facts(4)
    finally:
        registry.registered.cache_clear()
    assert {(fact.suite, fact.step): fact.win for fact in facts} == {
        ("both", 0): 0.5,
        ("sums", 0): 1.0,
        ("both", 10): 0.5,
        ("sums", 10): 1.0,
    }
    (fact,) = [fact for fact in facts if (fact.suite, fact.step) == ("sums", 10)]
    assert (fact.version, fact.episodes, fact.by_family) == (10, 6, {"small": 1.0})
    samples = (stage.context.directory / "evaluations" / "sums-10.jsonl").read_text().splitlines()
    assert len(samples) == 6
    assert all("How much is" in line for line in samples)


def test_a_test_split_may_not_choose_the_checkpoint() -> None:
    def check(source: str) -> None:
        suites = (SuiteConfig(name="chooses", source=source, episodes=2),)
        learner = LearnerConfig(best_by="chooses")
        EvaluatorRole.check(make_config(evaluator=EvaluatorConfig(suites=suites), learner=learner))

    check("seeds:validation")
    with pytest.raises(ConfigError, match="is a test split"):
        check("seeds:test")


def test_the_guide_names_every_built_in_suite() -> None:
    docs = Path(__file__).parents[2] / "docs"
    guide = (docs / "recipes.md").read_text() + (docs / "evaluation.md").read_text()
    levels = [f"`seeds:{level}`" for level in seeds.SUITES]
    assert all(name in guide for name in levels)
    assert all(f"`{name}" in guide for name in registry.registered(registry.SUITES))
