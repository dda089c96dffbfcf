"""Refusals as one server takes them: a newer policy first, then who is at fault, then the end of the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace

import anyio
import pytest
import structlog
from scenes.fake_vllm import policy
from scenes.memory_bus import MemoryBus

import roles.server.lifecycle as module
import roles.server.rolling_update as rollout_module
from bus import BusUnavailable, Record
from bus.messages import PolicyPublished, ServerServing
from engine.config import AgentConfig, Config, ModelConfig, RunConfig, SamplingConfig, ServerConfig
from engine.inference.vllm import VllmClient
from engine.weights.loaders import FileLoader
from engine.weights.update import FetchFailed, UpdateRefused
from roles.server.lifecycle import NewestPolicy, ServerLifecycle, Unserved
from roles.server.rolling_update import RollingUpdate

START = 100.0  # by a clock that only the scripts move
GONE = UpdateRefused("the weights are not on the bus any more")
AWAY = FetchFailed("the broker is away")


@dataclass
class Slow:
    """A load that takes longer than refusals may last; ``happens`` happens meanwhile, ``error`` ends it."""

    error: Exception = GONE
    happens: Callable[[Scripted], Awaitable[None]] = lambda life: anyio.lowlevel.checkpoint()


def news(*told: int | tuple[str, int]) -> Callable[[Scripted], Awaitable[None]]:
    """Publish versions, and let servers announce theirs, one after the other."""

    async def happens(life: Scripted) -> None:
        for one in told:
            if isinstance(one, int):
                await life.published(one)
            else:
                life.says(*one)

    return happens


class Scripted(ServerLifecycle):
    """A life that serves version 1.

    ``script`` says how the first load ends, the second, and so on; one of which it says nothing succeeds.
    ``tried`` are the versions.
    """

    now = 0.0

    def __init__(self, *script: Slow | Exception) -> None:
        config = Config(
            run=RunConfig(name="t"),
            model=ModelConfig(path="x"),
            server=ServerConfig(start_seconds=START),
            agent=AgentConfig(sampling=SamplingConfig(max_tokens=4)),
        )
        self.bus = MemoryBus(run="t", role="server", instance="server-0")
        self.newest, self.rollout = NewestPolicy(), RollingUpdate(rolling=True)
        super().__init__(
            "server-0-0", config, self.bus, self.newest, structlog.get_logger(), FileLoader(), self.rollout
        )
        self.serving, self.script = policy(1), list(script)
        self.tried: list[int] = []
        self.says("server-0-0", 1)

    def says(self, server: str, version: int, epoch: str = "e") -> None:
        """Let ``server`` announce ``version``."""
        self.rollout.note(
            ServerServing(server=server, epoch=epoch, url="u", version=version, canary_error=0.0, seconds=0.0)
        )

    async def published(self, version: int) -> None:
        """Publish ``version`` and hear of it."""
        await self.bus.publish(policy(version))
        self.newest.offer(policy(version))

    async def end(self) -> int:
        """Return which version it serves in the end, when version 2 is published."""
        await self.published(2)
        with anyio.fail_after(20):
            return (await self.bring_newest(None, policy(2))).version  # type: ignore[arg-type]

    async def _bring(self, client: VllmClient, policy: PolicyPublished) -> None:
        self.tried.append(policy.version)
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Slow):
            Scripted.now += 1.5 * START
            await step.happens(self)
            step = step.error
        if step is not None:
            raise step


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FETCH_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: Scripted.now))


async def test_a_long_outage_does_not_count_as_refusal() -> None:
    life = Scripted(Slow(AWAY), GONE)
    assert await life.end() == 2
    assert life.tried == [2, 2, 2]


async def test_refusals_count_anew_after_an_outage() -> None:
    assert await Scripted(GONE, Slow(AWAY), GONE).end() == 2


async def test_refusals_do_not_count_as_outage() -> None:
    life = Scripted(Slow(happens=news(3)), AWAY)
    life.serving = None
    assert await life.end() == 3
    assert life.tried == [2, 3, 3]


async def test_a_long_outage_ends_a_server_that_has_nothing_to_serve() -> None:
    life = Scripted(AWAY, Slow(AWAY))
    life.serving = None
    with pytest.raises(FetchFailed):
        await life.end()
    assert life.tried == [2, 2]


async def unheard(life: Scripted) -> None:
    """Publish a version that the stream has not brought yet."""
    life.says("server-0-1", 2)
    await life.bus.publish(policy(3))


@pytest.mark.parametrize(
    ("script", "tried"),
    [
        ((Slow(happens=news(("server-0-1", 2), 3, ("server-0-1", 3))),), [2, 3]),
        ((Slow(happens=unheard),), [2, 3]),
        ((GONE, Slow(happens=news(3)), GONE), [2, 2, 3, 3]),
    ],
    ids=["before anybody is blamed", "and asked for", "with all the time that the one before had"],
)
async def test_a_newer_policy_is_tried(script: tuple[Slow | Exception, ...], tried: list[int]) -> None:
    life = Scripted(*script)
    assert await life.end() == 3
    assert life.tried == tried


async def test_what_was_asked_for_is_not_replaced_by_what_the_stream_brings_later() -> None:
    newest, bus = NewestPolicy(), MemoryBus(run="t", role="server", instance="server-0")
    first, second = [await bus.publish(policy(version)) for version in (1, 2)]
    await newest.ask(bus)
    assert newest.policy == policy(2)
    newest.offer(policy(1), first)
    newest.offer(policy(2), second)
    assert newest.policy == policy(2)
    newest.offer(policy(1 << 32 | 1), first)
    assert newest.policy == policy(1 << 32 | 1), "a new learner has the say, even if the old one spoke later"
    newest.offer(policy(1 << 32 | 2), second + 1)
    assert newest.policy == policy(1 << 32 | 2)


async def test_nobody_is_blamed_while_the_bus_does_not_say_what_is_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def is_back(life: Scripted) -> None:
        life.says("server-0-1", 1, epoch="f")
        monkeypatch.setattr(life.bus, "last", there)

    async def away(tail: str) -> Record | None:
        raise BusUnavailable("last message", 1.0)

    life = Scripted(GONE, Slow(), Slow(happens=is_back), GONE)
    there = life.bus.last
    monkeypatch.setattr(life.bus, "last", away)
    life.says("server-0-1", 2)
    assert await life.end() == 2
    assert life.tried == [2] * 5


@pytest.mark.parametrize(
    ("before", "patience", "script"),
    [
        ((), START, [Slow(happens=news(("server-0-1", 2)))]),
        ((("server-0-1", 3),), START, [Slow()]),
        ((("server-1-0", 1),), 4 * START, [Slow(), Slow(), Slow(happens=news(("server-1-0", 2)))]),
    ],
    ids=["took the version in the end", "has gone further", "of another host had its time to wait for this"],
)
async def test_the_run_goes_on_where_another_server(
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[tuple[str, int], ...],
    patience: float,
    script: list[Slow],
) -> None:
    """One of another host does not know of the refusal and waits for its turn; only then it loads."""
    monkeypatch.setattr(rollout_module, "LEAST_PATIENCE", patience)
    life = Scripted(GONE, *script)
    await news(*before)(life)
    with pytest.raises(UpdateRefused) as caught:
        await life.end()
    assert not isinstance(caught.value, Unserved)
    assert life.tried == [2] * (1 + len(script))


async def test_no_server_is_waited_for_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "LEAST_PATIENCE", START)
    life = Scripted(GONE, Slow(), Slow(), Slow())
    life.says("server-1-0", 1)
    with pytest.raises(Unserved, match="no server took version 2 within 200 s"):
        await life.end()
    assert life.tried == [2, 2, 2]


async def test_a_version_that_nobody_takes_ends_the_run() -> None:
    life = Scripted(GONE, Slow(), Slow())
    with pytest.raises(Unserved, match="within 100 s: the weights are not on the bus any more"):
        await life.end()
    assert life.tried == [2, 2]
