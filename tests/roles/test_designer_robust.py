"""Whatever an author answers, it becomes a named rejection or an infrastructure fault, and the run goes on.

Real HTTP servers on loopback, the real sandbox and validator; only what the servers say is scripted.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import pytest_asyncio
from role_fakes import FakeChat, FakePool, make_config, make_context
from scenes.endpoint_fake import Behaviour, Drop, Hang, Raw, Say, Script, fake_endpoint, talking_vllm
from scenes.memory_bus import MemoryBus
from scenes.sandboxes import held_pool
from scenes.small_run import serving, ticket

from bus.messages import DesignFailed, DesignRejected, DesignTicket, EnvironmentReady, Message
from engine.config import DesignerConfig, EndpointConfig, FrozenConfig, SamplingConfig
from engine.inference import endpoint as endpoint_module
from engine.inference.pool import InferencePool
from engine.nano import seeds
from roles import work_loop
from roles.designer.role import DesignerRole
from sandbox import SandboxPool, SandboxSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

AUTHORS = ("policy", "frozen", "external")
HINT = "Say \\ what you know; halve what is left."


def program() -> str:
    (family,) = seeds.families(["guess"])
    source = family.program(family.draw(1, random.Random(5), withheld=False), "kites")
    return source.replace(" def step", " def solution(self):return [self.s]\n def step")


def fenced(source: str) -> str:
    return f"Here it is.\n```python\n{source}\n```\n"


GOOD = fenced(program())
TWO = program() + "\n\n" + program().replace("class ", "class Other", 1)
SIMPLE = "class TwoEnv:\n    def reset(self, seed):\n        return 'x'\n    def step(self, action):\n"
SIMPLE += "        return 'x', 0.0, True, False, {}\n"

REPLIES: dict[str, tuple[Behaviour, str, str]] = {
    "garbage": (Say("\x07\ufffd{{{ ]]>  0x \u2603 %%"), "parse", ""),
    "prose": (Say("I would rather tell you about the weather, which is fine."), "parse", ""),
    "no class": (Say(fenced("def reset(seed):\n    return 'hello'")), "load", "Env"),
    "two classes": (Say(fenced(TWO)), "load", "which class is the game"),
    "200 kB": (Say(fenced(SIMPLE + "# " + "x" * 200_000)), "parse", "bytes of source"),
    "nothing": (Say(""), "extract", "no program"),
    "blanks": (Say("  \n \n"), "extract", "no program"),
    "null bytes": (Say(fenced("class AEnv:\n    x = '\0'")), "load", "no method reset"),
    "thought only": (Say("<think>I shall write a game.</think>"), "extract", "no program"),
}
FAULTS: dict[str, Behaviour] = {
    "http_500": Raw(b"oops", 500),
    "http_429": Raw(b"busy", 429, {"Retry-After": "0.001"}),
    "closed": Drop(),
    "slow": Hang(),
    "invalid json": Raw(b"<html>busy</html>"),
    "half an answer": Raw(b'{"choices": [{"mess'),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[SandboxPool]:
    """One pool of the module."""
    settings = SandboxSettings(allow_unsafe=True, zygotes=1, cpu_call_seconds=0.5)
    async with held_pool(settings) as pool:
        yield pool


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_loop, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(work_loop, "_LONGEST_DELAY", 0.01)
    monkeypatch.setattr(endpoint_module, "_FIRST_DELAY", 0.001)


class World:
    """A designer of one kind at work on a bus; ``script`` is what its author's server does."""

    def __init__(self, bus: MemoryBus, designer: DesignerRole) -> None:
        self.bus, self.designer = bus, designer

    async def facts(self, *tickets: DesignTicket) -> list[Message]:
        """Give out ``tickets``, wait until each is answered, return the facts about their designs."""
        found: list[Message] = []
        names = {ticket.design for ticket in tickets}
        await self.bus.publish_all(tickets)
        async with self.bus.follow("EVENT", tails=("event.designer.>",)) as records:
            answered = 0
            with anyio.fail_after(120):
                async for record in records:
                    if getattr(record.message, "design", "") not in names:
                        continue
                    found.append(record.message)
                    answered += isinstance(record.message, EnvironmentReady | DesignFailed)
                    if answered == len(tickets):
                        break
        return found


@asynccontextmanager
async def at_work(
    kind: str,
    script: Script,
    sandbox: SandboxPool,
    tmp_path: Path,
    *,
    seconds: float = 60.0,
    max_tokens: int = 210_000,
) -> AsyncIterator[World]:
    chat = FakeChat()
    bus = MemoryBus(run="test", role="scorer", instance="s0")

    def speak(text: str) -> Behaviour:
        return Say(HINT) if "<program>" in text else script(text)

    server: AbstractAsyncContextManager[Any] = (
        fake_endpoint(speak)
        if kind == "external"
        else talking_vllm(speak, chat, version="1" if kind == "policy" else "default")
    )
    async with server as fake, InferencePool(max_concurrency=8, request_seconds=seconds) as inference:
        config = make_config(
            designer=DesignerConfig(
                kind=kind,  # type: ignore[arg-type]
                concurrency=1,
                sampling=SamplingConfig(max_tokens=max_tokens),
                conformity="off",
                memory=False,
                external=EndpointConfig(
                    base_url=fake.url, model="m", tries=2, request_seconds=seconds, context_tokens=500_000
                ),
                frozen=FrozenConfig(url=fake.url),
            )
        )
        replace = msgspec.structs.replace
        config = replace(
            config,
            model=replace(config.model, max_model_len=500_000),
            server=replace(config.server, request_seconds=seconds),
        )
        pool: Any = inference if kind == "policy" else FakePool(lambda *_: HINT)
        context = make_context(bus.peer("designer", "x"), config, tmp_path, pool=pool, sandbox=sandbox)
        designer = DesignerRole(context)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(inference.watch, bus)
            if kind == "policy":
                await bus.publish(msgspec.structs.replace(serving(1), url=fake.url))
            async with anyio.create_task_group() as roles:
                roles.start_soon(designer.run)
                yield World(bus, designer)
                context.draining.set()
            tasks.cancel_scope.cancel()


def first(behaviour: Behaviour, times: int) -> Callable[[str], Behaviour]:
    """Do ``behaviour`` so many times, then write a good design."""
    left = iter([behaviour] * times)
    return lambda _: next(left, Say(GOOD))


@pytest.mark.parametrize("kind", AUTHORS)
async def test_every_reply_is_named_and_the_next_ticket_answered(
    kind: str, sandbox: SandboxPool, tmp_path: Path
) -> None:
    replies = [reply for reply, _, _ in REPLIES.values()]
    script = iter(replies)
    async with at_work(kind, lambda _: next(script, Say(GOOD)), sandbox, tmp_path) as world:
        facts = await world.facts(ticket("bad", attempts=len(replies)), ticket("good", attempts=1))
    rejected, (failed, ready) = facts[: len(replies)], facts[len(replies) :]
    for name, fact in zip(REPLIES, rejected, strict=True):
        _, rung, reason = REPLIES[name]
        assert isinstance(fact, DesignRejected), (name, fact)
        assert rung == fact.rung, (name, fact.rung, fact.reason)
        assert reason in fact.reason, (name, fact.reason)
        assert fact.reason, name
    assert isinstance(failed, DesignFailed)
    assert failed.failure == "policy"
    assert isinstance(ready, EnvironmentReady), ready
    assert world.designer.statistics()["attempts"] == len(replies) + 1


@pytest.mark.parametrize("kind", AUTHORS)
async def test_a_reply_that_was_cut_is_no_program(kind: str, sandbox: SandboxPool, tmp_path: Path) -> None:
    endless = Say("```python\nclass CutEnv:\n" + "    # more\n" * 100, "length")
    async with at_work(kind, lambda _: endless, sandbox, tmp_path, max_tokens=500) as world:
        rejected, _ = await world.facts(ticket(attempts=1))
    assert isinstance(rejected, DesignRejected)
    assert (rejected.rung, "cut" in rejected.reason) == ("extract", True)


@pytest.mark.parametrize("kind", ["policy", "external"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_a_passing_fault_costs_nothing_but_time(
    kind: str, fault: Behaviour, sandbox: SandboxPool, tmp_path: Path
) -> None:
    seconds = 0.2 if isinstance(fault, Hang) else 60.0
    async with at_work(kind, first(fault, 2), sandbox, tmp_path, seconds=seconds) as world:
        (ready,) = await world.facts(ticket(attempts=1))
    assert isinstance(ready, EnvironmentReady), ready
    assert ready.attempt == 0, "a fault is no attempt"


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_a_lasting_fault_is_infrastructure_and_the_run_goes_on(
    fault: Behaviour, sandbox: SandboxPool, tmp_path: Path
) -> None:
    seconds = 0.05 if isinstance(fault, Hang) else 60.0
    script = first(fault, 2 * work_loop.ATTEMPTS)
    async with at_work("external", script, sandbox, tmp_path, seconds=seconds) as world:
        (failed,) = await world.facts(ticket("d1", attempts=1))
        (ready,) = await world.facts(ticket("d2", attempts=1))
    assert isinstance(failed, DesignFailed)
    assert failed.failure == "infra"
    assert "2 requests failed" in failed.reason
    if isinstance(fault, Raw) and fault.status != 200:
        assert f"HTTP {fault.status}: {fault.body.decode()}" in failed.reason
    assert isinstance(ready, EnvironmentReady)
