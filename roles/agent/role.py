"""The agent role: episode requests in, samples and outcomes out."""

from __future__ import annotations

from collections import Counter, OrderedDict

import anyio
import msgspec

from bus import Bus, Delivery
from bus.messages import Arm, EnvironmentReady, EpisodeRequest, FailureKind, program_subject
from engine.inference.completion import InferenceUnavailable
from roles.agent.concurrency import EpisodeLimit, LoadSnapshot
from roles.agent.episode import Player, Rules
from roles.base import Role, RoleContext
from roles.work_loop import INFRASTRUCTURE, answer_work, chat_tokens, hand_back
from sandbox import REASON_CHARACTERS, EnvQuarantined, InfraFailure

_LOOK_SECONDS = 0.25
_TOLD = 4096
_PROGRAMS = 1024


class AgentRole(Role):
    """Plays the requested episodes, one task each, as many at once as keep the servers full.

    The tokens of a play are stored before the fact about it. An infrastructure fault hands the episode back
    with a growing delay and becomes ``EpisodeFailed`` after ``roles.work_loop.ATTEMPTS`` deliveries; an
    episode without a reply or a step for ``agent.episode_seconds`` becomes one at once, because the scorer
    may reissue it. One that goes on is not cut, however long it takes. Faults of the policy or its program
    are outcomes.
    """

    name = "agent"
    needs = frozenset({"pool", "sandbox"})

    _player: Player

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        self._counts = Counter(in_hand=0, turns=0)
        self._missed = 0
        self._programs = ProgramCache(self.bus)
        self._told: OrderedDict[tuple[str, str, bool], None] = OrderedDict()
        self._limit = EpisodeLimit(self.config.agent.concurrency)

    async def run(self) -> None:
        chat = await chat_tokens(self.context)
        if self.config.agent.tool_format == "native":  # a template that does not serve ends the start
            style = chat.tool_style
            self.log.info("agent.tools", calls=style.calls.name, listed=style.lists, results=style.results)
        shared = self.context.shared
        self._player = Player(shared["pool"], shared["sandbox"], chat, Rules.of(self.config))
        self._look(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_looking)
            await answer_work(
                self,
                EpisodeRequest,
                self._play,
                counts=self._counts,
                limit=self.config.agent.concurrency,
                now=lambda: self._limit.limit,
            )
            tasks.cancel_scope.cancel()

    @property
    def slots(self) -> int:
        return self._limit.limit

    def statistics(self) -> dict[str, float]:
        return {
            "limit": self._limit.limit,
            "limit_cuts": self._limit.cuts,
            **self._counts,
        }

    async def _keep_looking(self) -> None:
        seen = 0
        while True:
            await anyio.sleep(_LOOK_SECONDS)
            ended, seen = self._player.replies - seen, self._player.replies
            self._look(ended)

    def _look(self, ended: int) -> None:
        shared = self.context.shared
        load = LoadSnapshot.of(
            shared["pool"].statistics(),
            shared["sandbox"].statistics(),
            waiting=shared["pool"].waiting(self._player.playing),
            missed=self._missed,
            held=self._counts["in_hand"],
        )
        self._limit.look(load, held=self._counts["in_hand"], away=self._player.stepping, ended=ended)

    async def _play(self, request: EpisodeRequest, delivery: Delivery) -> None:
        try:
            if not request.source:
                source = await self._programs.source(request.environment)
                request = msgspec.structs.replace(request, source=source)
            played = await self._player.play(request, self.config.agent.episode_seconds)
        except EnvQuarantined as error:
            await self._fail(request, delivery, "quarantined", str(error))
            return
        except TimeoutError as error:
            self._missed += 1
            await self._fail(request, delivery, "infra", str(error))
            return
        except INFRASTRUCTURE as error:
            self._missed += isinstance(error, InferenceUnavailable)
            episode = request.episode
            if not await hand_back(delivery, error, counts=self._counts, log=self.log, episode=episode):
                await self._fail(request, delivery, "infra", str(error))
            return
        sample = played.sample(request, self._player.rules)
        if sample is not None:
            await self.bus.publish(sample)
        told = self._is_first(request.design, request.arm, played.ending.returned > 0)
        await self.bus.publish(played.finished(request, sample, told=told))
        await delivery.ack()
        self._counts["turns"] += len(played.transcript)
        self._counts[played.ending.failure or played.ending.outcome] += 1

    def _is_first(self, design: str, arm: Arm, won: bool) -> bool:
        """Return whether no such play ended here before: its transcript is published."""
        kind = (design, arm, won)
        first = kind not in self._told
        self._told[kind] = None
        if len(self._told) > _TOLD:
            self._told.popitem(last=False)
        return first

    async def _fail(
        self, request: EpisodeRequest, delivery: Delivery, failure: FailureKind, reason: str
    ) -> None:
        await self.bus.publish(request.failed(failure, reason[:REASON_CHARACTERS]))
        await delivery.ack()
        self._counts[f"failed_{failure}"] += 1


class ProgramCache:
    """Programs by digest, each read once from the fact that published it; the ones used last are kept."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._sources: OrderedDict[str, str] = OrderedDict()
        self._lock = anyio.Lock()

    async def source(self, environment: str) -> str:
        """Return the program with this digest. Raises InfraFailure when no fact holds it."""
        async with self._lock:
            if environment not in self._sources:
                record = await self._bus.last(program_subject(environment))
                fact = record.message if record else None
                if not isinstance(fact, EnvironmentReady) or fact.environment != environment:
                    raise InfraFailure(
                        f"the stream EVENT has no program {environment[:12]}: its bound has dropped it; "
                        "raise bus.store_gb"
                    )
                self._sources[environment] = fact.source
            self._sources.move_to_end(environment)
            while len(self._sources) > _PROGRAMS:
                self._sources.popitem(last=False)
            return self._sources[environment]
