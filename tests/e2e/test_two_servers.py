"""Two real servers, ten versions, one kill -9: all plays end, and no token is under a version in doubt."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import anyio
import markov_policy
import numpy as np
import psutil
import pytest
import structlog
from scenes.small_run import request
from tiny_llama import announcement, logprobs

from bus import Bus, connect, provision, serve
from bus.messages import (
    EpisodeFailed,
    EpisodeFinished,
    EpisodeSample,
    Message,
    PolicyPublished,
    Segment,
    ServerLost,
    ServerServing,
)
from engine.config import AgentConfig, Config, ModelConfig, RunConfig, SamplingConfig, ServerConfig
from engine.context import RoleContext
from engine.inference.completion import Completion
from engine.inference.vllm import VllmClient
from engine.lineage import Version
from engine.running.role_host import Host, services
from engine.training.samples import arrays
from engine.weights.publisher import FilePublisher
from sandbox import SandboxSettings

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RUN = "two"
VERSIONS, KILL_AT, BACK_AT = 10, 3, 7
EPISODES, IN_HAND, FEW, TURNS = 64, 16, 2, 6
SECONDS = 240.0  # of any single wait
PROGRAM = f'''
class TurnsEnv:
    """Won by making {TURNS} moves."""

    def __init__(self, max_turns=8):
        self.turn = 0

    def reset(self, seed):
        self.turn = 0
        return f"begin {{seed}}"

    def step(self, action):
        self.turn += 1
        done = self.turn == {TURNS}
        return f"move {{self.turn}}", float(done), done, False, {{}}
'''


@dataclass
class Asked:
    """One request of the pool to one server; ``answer`` is None while it runs and when it failed."""

    url: str
    at: float
    answer: Completion | None = None


@dataclass
class Facts:
    """The facts of the bus, each with its sequence and the time of its arrival."""

    heard: list[tuple[int, Message, float]] = field(default_factory=list)
    posted: int = 0
    in_hand: int = IN_HAND
    _changed: anyio.Event = field(default_factory=anyio.Event)

    async def follow(self, bus: Bus) -> None:
        async with bus.follow("EVENT") as records:
            async for record in records:
                self.heard.append((record.sequence, record.message, monotonic()))
                changed, self._changed = self._changed, anyio.Event()
                changed.set()

    def of(self, kind: type[Message]) -> list[tuple[int, Any, float]]:
        return [fact for fact in self.heard if isinstance(fact[1], kind)]

    def serving(self) -> dict[str, ServerServing]:
        """The last word of each server that was not lost after it."""
        found: dict[str, ServerServing] = {}
        for _, message, _ in self.heard:
            if isinstance(message, ServerServing):
                found[message.server] = message
            elif isinstance(message, ServerLost):
                found.pop(message.server, None)
        return found

    def ended(self) -> int:
        return len(self.of(EpisodeFinished)) + len(self.of(EpisodeFailed))

    def serve(self, names: set[str], version: int) -> Callable[[], bool]:
        """Return a condition: all servers in ``names`` serve ``version``."""
        return lambda: names <= {name for name, one in self.serving().items() if one.version == version}

    async def keep_posting(self, bus: Bus, enough: anyio.Event) -> None:
        """``in_hand`` plays are always there, while versions come and a server is away."""
        while self.posted < EPISODES or not enough.is_set():
            await self.until("the end of a play", lambda: self.posted - self.ended() < self.in_hand)
            await bus.publish(request(self.posted, source=PROGRAM))
            self.posted += 1

    async def until(self, what: str, reached: Callable[[], bool]) -> None:
        """Wait for facts after which ``reached``; asked with each of them."""
        with anyio.move_on_after(SECONDS):
            while not reached():
                await self._changed.wait()
            return
        known = [type(message).__name__ for _, message, _ in self.heard]
        pytest.fail(f"{what} did not come in {SECONDS:.0f} s; {self.serving()}, {known[-40:]}")


class Learner:
    """Publishes versions as the learner does; remembers the weights of each."""

    def __init__(self, bus: Bus, model: Any, directory: Path) -> None:
        self._bus, self._model = bus, model
        self._publisher = FilePublisher(directory / "weights", keep=3)
        self.weights: dict[int, dict[str, Any]] = {}

    async def publish(self, step: int) -> int:
        markov_policy.perturb(self._model, step)
        version = Version(0, step)
        release = await anyio.to_thread.run_sync(self._publisher.release, version, self._model.state_dict())
        self.weights[version.pack()] = {name: one.clone() for name, one in self._model.state_dict().items()}
        await self._bus.publish(announcement(self._model, version, release, range(3, 67)))
        return version.pack()

    def error(self, segment: Segment) -> float:
        """Return the largest distance of a segment's log-probs from those of the weights of its spans."""
        ids, _, found = arrays(segment)
        tokens = ids.tolist()
        worst = 0.0
        for span in segment.spans:
            self._model.load_state_dict(self.weights[span.version])
            expected = logprobs(self._model, tokens)
            difference = np.abs(expected[span.start - 1 : span.stop - 1] - found[span.start : span.stop])
            worst = max(worst, float(difference.max()))
        return worst


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """Every request of the pool to a server: it alone sends a cache salt."""
    found: list[Asked] = []
    generate = VllmClient.generate

    async def spy(self: VllmClient, *args: Any, **options: Any) -> Completion:
        if options.get("salt") is None:
            return await generate(self, *args, **options)
        request = Asked(self.url, monotonic())
        found.append(request)
        request.answer = await generate(self, *args, **options)
        return request.answer

    monkeypatch.setattr(VllmClient, "generate", spy)
    return found


def make_config(model: Path) -> Config:
    return Config(
        run=RunConfig(name=RUN, drain_seconds=10.0),
        model=ModelConfig(path=str(model), max_model_len=1536),
        server=ServerConfig(count=2, max_concurrency=32, request_seconds=60.0),
        sandbox=SandboxSettings(preload=()),
        agent=AgentConfig(
            concurrency=IN_HAND,
            sampling=SamplingConfig(max_tokens=256),
            max_turns=8,
            context_tokens=1500,
            prompt="nano",
        ),
    )


@asynccontextmanager
async def stack(config: Config, directory: Path) -> AsyncIterator[tuple[Bus, Facts]]:
    """Broker, pool, sandbox, and the roles server and agent, as a run has them; drained at the end."""
    from roles.agent.role import AgentRole
    from roles.server.role import ServerRole

    async with serve(directory / "bus", run=RUN, store_gb=1.0) as broker:
        login: dict[str, Any] = {"run": RUN, "token": broker.token}
        await provision(broker.url, store_gb=1.0, **login)
        async with (
            connect(broker.url, role="supervisor", instance="0", **login) as bus,
            anyio.create_task_group() as tasks,
        ):
            facts = Facts()
            tasks.start_soon(facts.follow, bus)
            async with services(config, bus, frozenset({"pool", "sandbox"}), tasks) as shared:

                async def host(kind: Any, draining: anyio.Event, ended: anyio.Event) -> None:
                    name = f"{kind.name}-0"
                    async with connect(broker.url, role=kind.name, instance=name, **login) as own:
                        log = structlog.get_logger()
                        context = RoleContext(config, own, directory, name, log, draining, shared=shared)
                        await Host(kind(context), context).run()
                    ended.set()

                drains = [(kind, anyio.Event(), anyio.Event()) for kind in (AgentRole, ServerRole)]
                for drain in drains:
                    tasks.start_soon(host, *drain)
                yield bus, facts
                for _, draining, ended in drains:
                    draining.set()
                    await ended.wait()
            tasks.cancel_scope.cancel()


def kill(url: str) -> None:
    """Kill the server process at ``url`` as the kernel would for want of memory."""
    port = str(urlsplit(url).port)
    for child in psutil.Process().children(recursive=True):
        try:
            words = child.cmdline()
        except psutil.Error:  # it ended meanwhile, as programs of the sandbox do
            continue
        if "vllm.entrypoints.openai.api_server" in words and port in words and "-I" not in words:
            os.kill(child.pid, signal.SIGKILL)
            return
    raise AssertionError(f"no server at {url}")


async def test_sixty_four_plays_ten_versions_one_kill(tmp_path: Path, asked: list[Asked]) -> None:
    model = markov_policy.build(tmp_path / "model", letters=30.0)
    async with stack(make_config(tmp_path / "model"), tmp_path) as (bus, facts):
        learner = Learner(bus, model, tmp_path)
        enough = anyio.Event()

        both, survivor = {"server-0-0", "server-0-1"}, {"server-0-1"}
        version = await learner.publish(0)
        await facts.until("both servers", facts.serve(both, version))
        killed = facts.serving()["server-0-0"]
        async with anyio.create_task_group() as posting:
            posting.start_soon(facts.keep_posting, bus, enough)
            names = both
            for step in range(1, VERSIONS + 1):
                if step == KILL_AT:
                    kill(killed.url)
                    names = survivor
                    await facts.until("the loss", lambda: bool(facts.of(ServerLost)))
                if step == BACK_AT:
                    names, facts.in_hand = both, FEW  # it starts faster beside little work
                    await facts.until("the restarted server", facts.serve(both, version))
                    facts.in_hand = IN_HAND
                version = await learner.publish(step)
                await facts.until(f"version {step}", facts.serve(names, version))
                ended = facts.ended() + 3
                await facts.until("three plays", lambda ended=ended: facts.ended() >= ended)
            new = facts.serving()["server-0-0"]
            answered = lambda: any(one.url == new.url and one.answer for one in asked)  # noqa: E731
            await facts.until("traffic for the restarted server", answered)
            enough.set()
        await facts.until("the end of all plays", lambda: facts.ended() == facts.posted)
        samples = [record.message async for record in bus.replay("SAMPLE")]
    check_ends(facts, facts.posted)
    check_versions(facts, asked)
    check_restart(facts, asked, killed, new)
    stored = [one for one in samples if isinstance(one, EpisodeSample)]
    assert {one.sample for one in stored} >= {one.sample for _, one, _ in facts.of(EpisodeFinished)}
    segments = [segment for one in stored for segment in one.segments]
    mixed = [segment for segment in segments if len({span.version for span in segment.spans}) > 1]
    assert mixed, "no play went on through an update"
    for segment in mixed[:: max(1, len(mixed) // 6)]:
        assert learner.error(segment) < 1e-3


def check_ends(facts: Facts, posted: int) -> None:
    """Every play has an outcome, and none was lost to the infrastructure."""
    assert not facts.of(EpisodeFailed)
    finished = [message for _, message, _ in facts.of(EpisodeFinished)]
    assert len({one.episode for one in finished}) == len(finished) == posted >= EPISODES
    won = [one for one in finished if one.outcome == "terminated"]
    assert {one.turns for one in won} == {TURNS}
    assert len(won) > 0.8 * posted
    assert all(one.failure == "policy" for one in finished if one.outcome != "terminated")


def check_versions(facts: Facts, asked: list[Asked]) -> None:
    """A token's version was acknowledged by its server, and before the play that holds it was published."""
    by_url: dict[str, set[int]] = {}
    first: dict[int, int] = {}
    for sequence, one, _ in facts.of(ServerServing):
        by_url.setdefault(one.url, set()).add(one.version)
        first.setdefault(one.version, sequence)
    assert len(first) == VERSIONS + 1
    used: set[int] = set()
    for one in asked:
        if one.answer is not None:
            versions = {span.version for span in one.answer.spans}
            assert versions <= by_url[one.url]
    for sequence, one, _ in facts.of(EpisodeFinished):
        assert one.versions is not None
        for version in one.versions:
            assert first[version] < sequence
            used.add(version)
    assert len(used) > VERSIONS / 2


def check_restart(facts: Facts, asked: list[Asked], killed: ServerServing, new: ServerServing) -> None:
    """The killed server was lost once; the new one got nothing before it served the current version."""
    assert {(one.server, one.epoch) for _, one, _ in facts.of(ServerLost)[:1]} == {
        (killed.server, killed.epoch)
    }
    assert new.epoch != killed.epoch
    back = next((at, one) for _, one, at in facts.of(ServerServing) if one.epoch == new.epoch)
    newest = max(one.version for _, one, at in facts.of(PolicyPublished) if at <= back[0])
    assert back[1].version == newest, "it was announced with an old version"
    assert newest >= Version(0, KILL_AT).pack()
    to_new = [one for one in asked if one.url == new.url]
    assert to_new
    # The pool hears of it at the same time as this test: a message's way on loopback lies between them.
    assert min(one.at for one in to_new) > back[0] - 0.05
    for one in to_new:
        assert one.answer is None or min(span.version for span in one.answer.spans) >= newest
