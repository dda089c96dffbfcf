"""A designer at work on the bus of this process, with a scripted policy and a validator that reads names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from role_fakes import COUNTER, FakePool, FakeSandbox, RoleStage, Script, make_config, make_context
from scenes.memory_bus import MemoryBus
from scenes.small_run import scored, ticket

from bus.messages import DesignSample, DesignTicket, EnvironmentReady, EnvironmentScored, Message, Segment
from engine.config import DesignerConfig, SamplingConfig
from engine.training.samples import arrays
from roles import work_loop
from roles.designer import role as designer_role
from roles.designer.role import DesignerRole
from sandbox import Verdict

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


def quick(monkeypatch: pytest.MonkeyPatch, validator: type = FakeValidator) -> None:
    """Let designers judge programs with ``validator`` and try again at once after a fault."""
    monkeypatch.setattr(work_loop, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(designer_role, "Validator", validator)


class Policy:
    """Answers design prompts from a list (the last one repeatedly), hint prompts with ``hints``."""

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


class Stage(RoleStage):
    """A designer at work, its bus and its fakes."""

    def __init__(
        self, tmp_path: Path, policy: Script, *, bus: MemoryBus | None = None, **designer: Any
    ) -> None:
        self.bus = bus or MemoryBus(run="test", role="scorer", instance="s0")
        self.policy: Any = policy
        self.pool, self.sandbox = FakePool(policy), FakeSandbox()
        settings: dict[str, Any] = {"concurrency": 4, "sampling": SamplingConfig(max_tokens=2000), **designer}
        config = make_config(designer=DesignerConfig(**settings))
        self.context = make_context(
            self.bus.peer("designer", "x"), config, tmp_path, pool=self.pool, sandbox=self.sandbox
        )
        self.role = self.designer = DesignerRole(self.context)

    async def answer(self, count: int, *tickets: DesignTicket) -> list[Message]:
        """Work until ``count`` facts about designs are there, return them."""
        await self.bus.publish_all(tickets or [ticket()])
        async with self.at_work():
            found = await self.told(count, "event.designer.>")
        assert (await self.bus.stream_info("TASK")).messages == 0
        return found

    async def work(self, *tickets: DesignTicket) -> None:
        """Work until each ticket has its environment, or has failed."""
        start = (await self.bus.stream_info("EVENT")).last + 1
        ended = ("event.designer.ready.*", "event.designer.failed")
        await self.bus.publish_all(tickets)
        async with self.at_work(), self.bus.follow("EVENT", start=start, tails=ended) as facts:
            with anyio.fail_after(20):
                for _ in tickets:
                    await anext(facts)

    async def answers(self, *kinds: type[Message], to: Sequence[DesignTicket] = ()) -> list[Any]:
        """Work until there is a fact of each of ``kinds``, in this order, and return them."""
        found = await self.answer(len(kinds), *to)
        assert [type(fact) for fact in found] == [*kinds]
        return found

    async def ready(self, *tickets: DesignTicket) -> EnvironmentReady:
        """Work until the ticket has an environment, which is the only fact, and return it."""
        (found,) = await self.answers(EnvironmentReady, to=tickets)
        return found

    async def held(self) -> list[DesignSample]:
        return [record.message async for record in self.bus.replay("SAMPLE")]  # type: ignore[misc]


def verdict_on(ready: EnvironmentReady, **fields: Any) -> EnvironmentScored:
    """Return the verdict of a window in which ``ready`` was at the frontier."""
    known = {name: getattr(ready, name) for name in ("cohort", "environment", "skill", "document")}
    return scored(ready.design, 4, **{**known, "hinted": 0.8, "regret": 0.3, **fields})


def tokens(segment: Segment, *, trained: bool) -> list[int]:
    """Return the tokens of a segment that carry a loss, or those that do not."""
    ids, mask, _ = arrays(segment)
    return ids[mask if trained else ~mask].tolist()
