"""A small run: its recipe, messages with defaults, a view that remembers, roles that do little."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import anyio
import msgspec

from bus.messages import (
    BatchTrained,
    DesignRejected,
    DesignTicket,
    EnvironmentReady,
    EnvironmentScored,
    EpisodeFailed,
    EpisodeFinished,
    EpisodeRequest,
    EvaluationFinished,
    Finding,
    Message,
    PolicyPublished,
    RoundSummary,
    ServerLost,
    ServerServing,
    Turn,
)
from engine.config import (
    AgentConfig,
    Config,
    CurriculumConfig,
    EvaluatorConfig,
    ModelConfig,
    RunConfig,
    SuiteConfig,
    UiConfig,
)
from engine.context import RoleContext
from engine.lineage import Version
from engine.records.history import Event
from engine.records.status import RunStatus

SOURCE = "class CountEnv:\n    def reset(self, seed=None):\n        return '<b>count</b>', {}\n"


def config(directory: object = "runs", **tables: object) -> Config:
    """A recipe small enough for the fakes."""
    values: dict[str, object] = {
        "run": RunConfig(name="toy", directory=str(directory), steps=1, drain_seconds=5.0),
        "model": ModelConfig(path="model"),
        "agent": AgentConfig(max_turns=25),
        "curriculum": CurriculumConfig(
            environments=4, rounds_per_window=2, delay=2, plays_per_round=2, hinted_plays=2
        ),
        "evaluator": EvaluatorConfig(suites=(SuiteConfig(name="mid", source="seeds:mid", episodes=8),)),
        "ui": UiConfig(live="off"),
    }
    return Config(**(values | tables))  # type: ignore[arg-type]


def policy(step: int, fence: int = 0) -> PolicyPublished:
    return PolicyPublished(
        version=Version(fence, step).pack(), step=step, uri=f"file:///weights/{fence}-{step}",
        sha256="0" * 64, size=8, canary_tokens=b"", canary_logprobs=b"",
    )  # fmt: skip


def batch(round_: int, step: int, fence: int = 0, *, final: bool = False, age: int = 1) -> BatchTrained:
    return BatchTrained(
        round=round_, step=step, version=Version(fence, step).pack(), trained=("a", "b", "c"),
        dropped=(("d", "stale"),), agent_samples=2, designer_samples=1, max_staleness=age, mean_staleness=0.5,
        metrics={"loss": 0.1, "generated_agent_under_64": 9.0, "trained_agent_under_64": 8.0}, seconds=1.0,
        final=final,
    )  # fmt: skip


def serving(step: int, fence: int = 0, *, server: str = "server-0", epoch: str = "e1") -> ServerServing:
    return ServerServing(
        server=server, epoch=epoch, url="http://127.0.0.1:1", version=Version(fence, step).pack(),
        canary_error=1e-6, seconds=0.1,
    )  # fmt: skip


def evaluation(step: int, fence: int = 0, suite: str = "mid") -> EvaluationFinished:
    version = Version(fence, step).pack()
    return EvaluationFinished(
        suite=suite, step=step, version=version, version_high=version, episodes=8, win=0.5 + step / 100,
        stderr=0.02, by_family={"seq": 0.5}, seconds=1.0,
    )  # fmt: skip


def ticket(design: str = "d1", **fields: Any) -> DesignTicket:
    """Return a ticket for two attempts at a design of Logic."""
    values = {
        "cohort": 3, "slot": 1, "skill": "Logic", "seed": 11, "attempts": 2, "target": 0.5, "round": 0,
    }  # fmt: skip
    return DesignTicket(design=design, **(values | fields))


def rejected(design: str, attempt: int = 0, **fields: Any) -> DesignRejected:
    values = {"cohort": 0, "skill": "s", "rung": "parse", "reason": "no class", "source": "", "document": ""}
    return DesignRejected(design=design, attempt=attempt, **(values | fields))


def ready(design: str, cohort: int = 0, **fields: Any) -> EnvironmentReady:
    """Return the fact; ``fields`` are those of its finding, too."""
    values = {
        "slot": 0, "attempt": 0, "skill": "Logical Deduction", "environment": "f" * 64, "source": SOURCE,
        "hint": "Count <i>up</i>.", "document": "doc", "title": f"Counting {design}", "trivial_win_rate": 0.1,
        "difficulty": 1.0, **fields,
    }  # fmt: skip
    found = {name: values.pop(name) for name in Finding.__struct_fields__ if name in values}
    return EnvironmentReady(design=design, cohort=cohort, finding=Finding(**found), **values)


def scored(design: str, round_: int = 0, reward: float = 0.5, **fields: Any) -> EnvironmentScored:
    values = {
        "cohort": 0, "environment": "f" * 64, "skill": "Logical Deduction", "document": "doc", "plays": 4,
        "hinted_plays": 4, "win": 0.5, "win_low": 0.2, "win_high": 0.8, "hinted": 0.75, "regret": 0.25,
        "regret_low": 0.0, "regret_high": 0.5, "noise_floor": 0.2, "plateau": 1.0, "advantage": 0.0,
        "state": "frontier",
    }  # fmt: skip
    return EnvironmentScored(design=design, **({"round": round_, "reward": reward} | values | fields))


def finished(
    episode: str, design: str = "d1", returned: float = 1.0, arm: str = "plain", round_: int = 0
) -> EpisodeFinished:
    return EpisodeFinished(
        episode=episode, design=design, arm=arm,
        round=round_, index=0, returned=returned, outcome="terminated", failure=None, reason="",
        turns=1, transcript=(Turn("<count>", "say \\boxed{1}", "1", returned),),
        seconds=0.5, sample=f"sample-{episode}", tokens=3, versions=(0, 0),
    )  # fmt: skip


def request(number: int, **fields: Any) -> EpisodeRequest:
    """Return the work of playing one instance without a hint."""
    values = {
        "episode": f"e{number}", "index": number, "seed": number, "design": "d1", "environment": "f",
        "arm": "plain", "round": 0, "max_turns": 8,
    }  # fmt: skip
    return EpisodeRequest(**(values | fields))


def failed(episode: str, failure: str = "infra") -> EpisodeFailed:
    return EpisodeFailed(
        episode=episode, design="d1", arm="plain", round=0, index=0, failure=failure, reason="gone"
    )


def summary(round_: int, **fields: Any) -> RoundSummary:
    values = {
        "environments": 4, "accepted": 3, "rejected": 1, "plain": 0.4, "hinted": 0.6, "in_band": 0.5,
        "gradient_share": 0.75, "difficulty": 1.2, "failures": {}, "win_histogram": (1, 0, 2, 1),
        "reward": 0.3,
    }  # fmt: skip
    return RoundSummary(round=round_, **(values | fields))


def events(messages: list[Message], *, start: int = 1, at: float = 1000.0) -> list[Event]:
    return [Event(start + index, at + index, message) for index, message in enumerate(messages)]


class RememberingView:
    """A view that keeps what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.seen: list[tuple[str, RunStatus]] = []
        self._updated = anyio.Event()

    def showing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def update(self, status: RunStatus, phase: str) -> None:
        self.seen.append((phase, status))
        self._updated.set()
        self._updated = anyio.Event()

    async def when(self, condition: Callable[[RunStatus], bool]) -> None:
        """Return when a status that was shown meets ``condition``."""
        while not any(condition(status) for _, status in self.seen):
            await self._updated.wait()

    def say(self, text: str) -> None:
        self.said.append(text)


class FakeRole:
    """Waits for the drain; notes that it ended."""

    name: ClassVar[str] = "fake"
    needs: ClassVar[frozenset[str]] = frozenset()
    own_process: ClassVar[bool] = False
    ended: ClassVar[list[str]] = []

    def __init__(self, context: RoleContext) -> None:
        self.context = context

    async def run(self) -> None:
        await self.context.draining.wait()
        FakeRole.ended.append(self.name)

    def statistics(self) -> dict[str, float]:
        return {"queue": 3.0}


class FakeLearner(FakeRole):
    """Trains the two rounds of a run at once, then waits for the drain."""

    name = "learner"

    async def run(self) -> None:
        bus = self.context.bus
        for message in (policy(0), policy(1), batch(0, 1), policy(2), batch(1, 2, final=True)):
            await bus.publish(message)
        await super().run()


class FakeServer(FakeRole):
    """Serves what is published, and says when it ends."""

    name = "server"

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._serve)
            await super().run()
            tasks.cancel_scope.cancel()
        await self.context.bus.publish(ServerLost(server="server-0", epoch="e1", reason="drained"))

    async def _serve(self) -> None:
        async with self.context.bus.follow("EVENT", tails=["event.learner.published"]) as records:
            async for record in records:
                if isinstance(record.message, PolicyPublished):
                    await self.context.bus.publish(serving(record.message.step))


class FakeEvaluator(FakeRole):
    """Answers for the final version."""

    name = "evaluator"
    needs = frozenset()

    async def run(self) -> None:
        await self.context.bus.publish(evaluation(2))
        await super().run()


class StuckRole(FakeRole):
    """Does not heed the drain."""

    name = "stuck"

    async def run(self) -> None:
        await anyio.sleep_forever()


class BrokenRole(FakeRole):
    """Fails at once."""

    name = "broken"

    async def run(self) -> None:
        raise ValueError("three is not a number")


def with_roles(base: Config, *names: str, **run: object) -> Config:
    """``base`` with other roles and other fields of ``[run]``."""
    return msgspec.structs.replace(base, run=msgspec.structs.replace(base.run, roles=names, **run))  # type: ignore[arg-type]
