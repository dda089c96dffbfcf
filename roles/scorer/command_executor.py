"""Carries out what the curriculum asks for, in order: fetches tokens, publishes, purges, checkpoints."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import anyio
import msgspec
import structlog

from bus import Bus, NotFound
from bus.messages import EpisodeFinished, HeldDesign, Message, RoundClosed, SampleReady, Segment
from engine.errors import SpadeError
from roles.scorer.snapshot import FLUSHED_KEY
from roles.scorer.state import (
    Command,
    DesignCredit,
    Graded,
    MarkFlushed,
    Publish,
    PublishDesigns,
    PublishGroup,
    PurgeHeld,
)

_FETCHES = 32
_CACHE_BYTES = 64 << 20

log = structlog.get_logger("spade.scorer")


class CommandExecutor:
    """Commands in, messages out. Samples are acknowledged before the message that closes their round.

    Segments of plays are kept in memory (64 MiB) until their round closes; others are fetched from EVENT, at
    most 32 at a time. A play whose tokens EVENT has forgotten is sent without any: the learner drops it as
    ``empty``, so its id has an end, and what closes the round counts what was sent, however often it is said.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._limit = anyio.CapacityLimiter(_FETCHES)
        self._segments: OrderedDict[int, tuple[Segment, ...]] = OrderedDict()
        self._rounds: dict[int, set[int]] = {}
        self._forgotten: Counter[int] = Counter()
        self._bytes = 0
        self._counts: Counter[str] = Counter()

    def remember(self, sequence: int, outcome: EpisodeFinished) -> None:
        """Keep the segments of an outcome that has just been read, until they are asked for."""
        self._bytes += _size(outcome.segments) - _size(self._segments.pop(sequence, ()))
        self._segments[sequence] = outcome.segments
        self._rounds.setdefault(outcome.round, set()).add(sequence)
        while self._bytes > _CACHE_BYTES:
            self._bytes -= _size(self._segments.popitem(last=False)[1])

    def _warn(self, round_: int) -> None:
        """Say once a round how much of it cannot be trained."""
        if samples := self._forgotten.pop(round_, 0):
            log.warning(
                "scorer.samples_forgotten",
                round=round_,
                samples=samples,
                reason="the bus forgot their tokens before their group was graded",
                remedy="Raise bus.store_gb; what is forgotten is not trained.",
            )

    def _forget(self, round_: int) -> None:
        """Drop what the groups of closed rounds did not ask for: hinted plays, groups without variance."""
        for number in [number for number in self._rounds if number <= round_]:
            for sequence in self._rounds.pop(number):
                self._bytes -= _size(self._segments.pop(sequence, ()))

    async def execute(self, commands: Sequence[Command]) -> None:
        """Carry out ``commands``; returns when everything is stored.

        Raises SpadeError when something else lies in EVENT where an outcome was, BusUnavailable.
        """
        chunk: list[Command] = []
        for command in commands:
            closes = isinstance(command, Publish) and isinstance(command.message, RoundClosed)
            if closes or isinstance(command, PurgeHeld | MarkFlushed):
                await self._publish(chunk)
                chunk = []
            match command:
                case Publish(RoundClosed(round=round_)):
                    self._warn(round_)
                    self._forget(round_)
                    chunk.append(command)
                case PurgeHeld(tail):
                    self._counts["purged"] += await self._bus.purge("DESIGN", tail=tail)
                case MarkFlushed(steps):
                    await self._bus.state_put(FLUSHED_KEY, msgspec.msgpack.encode(steps))
                case _:
                    chunk.append(command)
        await self._publish(chunk)

    def statistics(self) -> dict[str, float]:
        """Counts of what was published, fetched, missing, forgotten; size of the cache."""
        return {"cached_bytes": self._bytes, "cached_plays": len(self._segments), **self._counts}

    async def _publish(self, commands: Sequence[Command]) -> None:
        if not commands:
            return
        parts: list[list[Message]] = [[] for _ in commands]
        async with anyio.create_task_group() as tasks:
            for part, command in zip(parts, commands, strict=True):
                match command:
                    case Publish(message):
                        part.append(message)
                    case PublishGroup():
                        tasks.start_soon(self._group, command, part)
                    case PublishDesigns():
                        tasks.start_soon(self._designs, command, part)
        messages = [message for part in parts for message in part]
        await self._bus.publish_all(messages)
        self._counts["published"] += len(messages)

    async def _group(self, group: PublishGroup, result: list[Message]) -> None:
        found: dict[int, tuple[Segment, ...]] = {}
        async with anyio.create_task_group() as tasks:
            for play in group.plays:
                tasks.start_soon(self._fetch_play, play, found)
        if lost := len(group.plays) - len(found):
            self._counts["samples_forgotten"] += lost
            self._forgotten[group.round] += lost
        result += [
            SampleReady(
                sample=play.sample,
                role="agent",
                skill=group.skill,
                group=group.group,
                round=group.round,
                reward=play.reward,
                advantage=play.advantage,
                segments=found.get(play.sequence, ()),
                members=group.members,
            )
            for play in group.plays
        ]

    async def _fetch_play(self, play: Graded, found: dict[int, tuple[Segment, ...]]) -> None:
        kept = self._segments.pop(play.sequence, None)
        if kept is not None:
            self._bytes -= _size(kept)
            found[play.sequence] = kept
            return
        async with self._limit:
            try:
                outcome = await self._bus.get("EVENT", play.sequence)
            except NotFound:
                return
        if not isinstance(outcome, EpisodeFinished):
            raise SpadeError(
                f"sequence {play.sequence} of EVENT is no outcome of a play any more",
                where="scorer",
                remedy="The broker lost facts of the run: begin a new run with --salvage RUN.",
            )
        self._counts["fetched"] += 1
        found[play.sequence] = outcome.segments

    async def _designs(self, command: PublishDesigns, result: list[Message]) -> None:
        found: dict[str, HeldDesign] = {}
        async with anyio.create_task_group() as tasks:
            for held, sample in zip(command.held, command.samples, strict=True):
                tasks.start_soon(self._fetch_design, held, sample, found)
        result += [
            SampleReady(
                sample=sample,
                role="designer",
                skill=held.skill,
                group=held.group or f"cohort-{held.cohort}",
                round=command.round,
                reward=held.reward,
                advantage=held.advantage,
                segments=found[sample].segments,
                accepted=held.valid and not held.part,
                members=held.members,
            )
            for held, sample in zip(command.held, command.samples, strict=True)
            if sample in found
        ]

    async def _fetch_design(self, held: DesignCredit, sample: str, found: dict[str, HeldDesign]) -> None:
        """Tokens that are gone, or that another try of the ticket has replaced, are not trained."""
        async with self._limit:
            record = await self._bus.last(held.tail)
        message = record.message if record else None
        if isinstance(message, HeldDesign) and message.valid == held.valid:
            found[sample] = message
        else:
            self._counts["designs_missing"] += 1


def _size(segments: tuple[Segment, ...]) -> int:
    return sum(len(part.tokens) + len(part.mask) + len(part.logprobs) for part in segments)
