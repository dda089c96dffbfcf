"""Scripted tasks around a real scorer on a bus: designer, agent, learner, server."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import structlog
from msgspec.structs import replace

from bus import Bus
from bus.messages import (
    DesignSample,
    DesignTicket,
    EpisodeRequest,
    EpisodeSample,
    Message,
    PolicyPublished,
    RoundClosed,
    Segment,
    Span,
)
from engine.config import Config
from engine.inference.segments import make_segment, token_ids
from engine.lineage import Version
from engine.training.samples import CreditedSample, Sampled
from roles.base import RoleContext
from roles.scorer.role import ScorerRole
from scenes.scorer_world import failed, finished, published, ready, rejected, serving, trained


def segment(text: str, version: Version) -> Segment:
    """Return a segment that carries ``text`` as its tokens, all sampled by ``version``."""
    tokens = list(text.encode())
    return make_segment(tokens, [0.0] * (len(tokens) - 1), [Span(version.pack(), 1, len(tokens))])


def text_of(sample: CreditedSample) -> str:
    """Return the text that :func:`segment` put into the sample's first segment."""
    return bytes(token_ids(sample.segments[0])).decode()


@dataclass
class Cast:
    """The other roles. ``samples`` and ``closed`` are what was credited, in order; ``stored`` all samples.

    ``done`` rounds were trained by an earlier learner; ``finals`` last batches end the play.
    """

    config: Config
    bus: Bus
    seed: int = 1
    done: int = 0
    finals: int = 1
    version: Version = field(default_factory=lambda: Version(1, 0))
    samples: dict[str, CreditedSample] = field(default_factory=dict)
    stored: dict[str, Sampled] = field(default_factory=dict)
    rounds: dict[int, list[str]] = field(default_factory=dict)
    closed: list[RoundClosed] = field(default_factory=list)
    work: Counter[str] = field(default_factory=Counter)
    over: anyio.Event = field(default_factory=anyio.Event)

    async def run(self) -> None:
        """Play all parts until the final batch is trained."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._designer)
            tasks.start_soon(self._agent)
            tasks.start_soon(self._server)
            tasks.start_soon(self._learner)
            await self.over.wait()
            tasks.cancel_scope.cancel()

    def _luck(self, *parts: object) -> float:
        return random.Random(f"{self.seed}:{parts}").random()

    async def _designer(self) -> None:
        async with self.bus.consume("designer", limit=4) as deliveries:
            async for delivery in deliveries:
                ticket = delivery.message
                assert isinstance(ticket, DesignTicket)
                self.work[ticket.key] += 1
                for message in (one for part in ticket.parts() for one in self._design(part)):
                    await self.bus.publish(message)
                await delivery.ack()

    def _design(self, ticket: DesignTicket) -> list[Message]:
        messages: list[Message] = []
        for attempt in range(ticket.attempts):
            valid = self._luck("valid", ticket.design, attempt) > 0.3
            tokens = segment(f"{ticket.design}-{attempt}", self.version)
            held = DesignSample(
                design=ticket.design,
                cohort=ticket.cohort,
                attempt=attempt,
                skill=ticket.skill,
                valid=valid,
                segments=(tokens,),
            )
            fact = ready(ticket, attempt=attempt) if valid else rejected(ticket, attempt)
            messages += [held, replace(fact, sample=held.sample)]
            if valid:
                return messages
        return [*messages, failed(ticket, ticket.attempts)]

    async def _agent(self) -> None:
        async with self.bus.consume("agent", limit=8) as deliveries:
            async for delivery in deliveries:
                request = delivery.message
                assert isinstance(request, EpisodeRequest)
                self.work[request.key] += 1
                won = self._luck("won", request.episode) < 0.5
                for message in self.outcome(request, float(won)):
                    await self.bus.publish(message)
                await delivery.ack()

    def outcome(self, request: EpisodeRequest, returned: float) -> list[Message]:
        """The tokens of a play and the fact about it."""
        text = f"{request.design}/{request.round}/{request.arm}/{request.index}"
        sample = EpisodeSample(
            episode=request.episode,
            round=request.round,
            segments=(segment(text, self.version),),
        )
        return [sample, finished(request, returned, sample=sample.sample)]

    async def _server(self) -> None:
        async with self.bus.follow("EVENT", tails=["event.learner.published"]) as records:
            async for record in records:
                assert isinstance(record.message, PolicyPublished)
                version = Version.unpack(record.message.version)
                await self.bus.publish(serving("s0", version))

    async def _learner(self) -> None:
        await self.bus.publish(published(self.version))
        async with self.bus.follow("SAMPLE") as records:
            async for record in records:
                match record.message:
                    case EpisodeSample() | DesignSample() as sample:
                        assert self.stored.setdefault(sample.sample, sample) == sample
                    case RoundClosed() as closed:
                        if closed.round in self.rounds:
                            assert closed in self.closed
                            continue
                        self.closed.append(closed)
                        for credit in closed.credits:
                            assert credit.sample not in self.samples, "credited once"
                            stored = self.stored[credit.sample]
                            self.samples[credit.sample] = CreditedSample(
                                credit.sample, credit.role, closed.round, credit, stored.segments
                            )
                        self.rounds[closed.round] = sorted(credit.sample for credit in closed.credits)
                        if closed.round >= self.done:
                            self.version = Version(1, self.version.step + 1)
                            await self.bus.publish(published(self.version))
                            await self.bus.publish(trained(closed.round, self.version, final=closed.final))
                        if sum(one.final for one in self.closed) == self.finals:
                            self.over.set()


def scorer(config: Config, bus: Bus, directory: Path, draining: anyio.Event | None = None) -> ScorerRole:
    """Return a scorer as a host would build it."""
    return ScorerRole(
        RoleContext(
            config=config,
            bus=bus,
            directory=directory,
            instance=bus.instance,
            log=structlog.get_logger(),
            draining=draining or anyio.Event(),
        )
    )
