"""The agent role: episode requests in, outcomes and segments out."""

from __future__ import annotations

from collections import Counter

import anyio

from bus import Delivery
from bus.messages import EpisodeFailed, EpisodeRequest, FailureKind
from roles.agent.episode import Played, Player, Rules
from roles.base import Role, RoleContext
from roles.work import (
    INFRASTRUCTURE,
    REASON_CHARACTERS,
    answer_work,
    chat_tokens,
    drain_grace,
    hand_back,
)
from sandbox import EnvQuarantined


class Agent(Role):
    """Plays what the scorer asks for: one task an episode, ``agent.concurrency`` at a time.

    An infrastructure fault hands the episode back with a growing delay and becomes ``EpisodeFailed`` after
    ``roles.work.ATTEMPTS`` deliveries; an episode that takes longer than ``agent.episode_seconds`` becomes
    one at once, because the scorer may reissue it. What the policy or its program caused is an outcome.
    """

    name = "agent"
    needs = frozenset({"pool", "sandbox"})

    _player: Player

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        self._counts: Counter[str] = Counter()
        self._in_hand = self._turns = 0

    async def run(self) -> None:
        chat = await chat_tokens(self.context)
        shared = self.context.shared
        self._player = Player(shared["pool"], shared["sandbox"], chat, Rules.of(self.config))
        await answer_work(
            self.bus,
            "agent",
            limit=self.config.agent.concurrency,
            draining=self.context.draining,
            grace=drain_grace(self.config),
            handle=self._answer,
        )

    @property
    def slots(self) -> int:
        return self.config.agent.concurrency

    def statistics(self) -> dict[str, float]:
        return {"in_hand": self._in_hand, "turns": self._turns, **self._counts}

    async def _answer(self, delivery: Delivery) -> None:
        request = delivery.message
        if not isinstance(request, EpisodeRequest):
            await delivery.term(f"an agent cannot answer {type(request).__name__}")
            return
        self._in_hand += 1
        try:
            await self._play(request, delivery)
        finally:
            self._in_hand -= 1

    async def _play(self, request: EpisodeRequest, delivery: Delivery) -> None:
        seconds = self.config.agent.episode_seconds
        played: Played | None = None
        try:
            with anyio.move_on_after(seconds):
                played = await self._player.play(request)
        except EnvQuarantined as error:
            await self._fail(request, delivery, "quarantined", str(error))
            return
        except INFRASTRUCTURE as error:
            episode = request.episode
            if not await hand_back(delivery, error, counts=self._counts, log=self.log, episode=episode):
                await self._fail(request, delivery, "infra", str(error))
            return
        if played is None:
            await self._fail(request, delivery, "infra", f"no outcome after {seconds:.0f} s")
            return
        await self.bus.publish(played.finished(request, mask_truncated=self._player.rules.mask_truncated))
        await delivery.ack()
        self._turns += len(played.transcript)
        self._counts[played.ending.failure or played.ending.outcome] += 1

    async def _fail(
        self, request: EpisodeRequest, delivery: Delivery, failure: FailureKind, reason: str
    ) -> None:
        await self.bus.publish(
            EpisodeFailed(
                episode=request.episode,
                design=request.design,
                arm=request.arm,
                round=request.round,
                index=request.index,
                failure=failure,
                reason=reason[:REASON_CHARACTERS],
            )
        )
        await delivery.ack()
        self._counts[f"failed_{failure}"] += 1
