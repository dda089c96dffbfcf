"""Who answers in the loop: designers and agents that are lucky or not, and write hints that help or tell."""

from __future__ import annotations

import random
from functools import lru_cache

import msgspec
from learner_fakes import segment

from bus.messages import DesignSample, DesignTicket, EpisodeRequest, EpisodeSample, Message, Segment
from engine.config import Config
from scenes.scorer_world import failed, finished, lost, ready, rejected

HINT = "look left"


class Luck(msgspec.Struct, frozen=True):
    """The frequency of an event among its opportunities.

    ``crashes`` bounds those of the scorer and of the learner. ``told`` is how often a hint plays its game,
    ``partly`` how often a return is neither 0 nor 1.
    """

    infra: float = 0.08
    quarantined: float = 0.02
    env: float = 0.05
    rejected: float = 0.2
    no_hint: float = 0.1
    redelivered: float = 0.08
    twice: float = 0.5
    scorer_dies: float = 0.03
    learner_dies: float = 0.05
    server_lost: float = 0.01
    crashes: int = 6
    unseen: float = 0.3
    told: float = 0.2
    degenerate: float = 0.05
    flagged: float = 0.05
    truncated: float = 0.1
    partly: float = 0.1


CALM = Luck(*[0] * len(Luck.__struct_fields__))


@lru_cache(maxsize=1024)
def tokens(versions: tuple[int, ...], length: int) -> tuple[Segment, ...]:
    """Segments of which each version sampled one."""
    return tuple(segment([1] * (length + 1), [0] + [1] * length, version=version) for version in versions)


class Cast:
    """Designers and agents: what they store, in order, tokens before the fact about them."""

    def __init__(self, config: Config, chance: random.Random, luck: Luck) -> None:
        self._config, self._chance, self._luck = config, chance, luck

    def _happens(self, probability: float) -> bool:
        return self._chance.random() < probability

    def _tokens(self, versions: tuple[int, ...]) -> tuple[Segment, ...]:
        return tokens(versions, self._chance.randint(1, 9))

    def design(
        self, ticket: DesignTicket, versions: tuple[int, ...], held: dict[str, DesignSample]
    ) -> list[Message]:
        """Try to write a design; a second try mostly finds the attempts that were stored before."""
        answers: list[Message] = []
        settings = self._config.designer
        again = not self._happens(self._luck.unseen)
        for attempt in range(ticket.attempts):
            if self._happens(self._luck.infra):
                return [*answers, failed(ticket, attempt, failure="infra")]
            written = DesignSample(
                design=ticket.design,
                cohort=ticket.cohort,
                attempt=attempt,
                skill=ticket.skill,
                valid=not self._happens(self._luck.rejected),
                segments=self._tokens(versions),
            )
            if again:
                written = held.get(written.tail, written)
            trains = settings.kind == "policy" and (written.valid or settings.invalid == "penalise")
            answers += [written] if trains else []
            sample = written.sample if trains else ""
            if written.valid:
                return [*answers, self._ready(ticket, written, sample)]
            answers.append(msgspec.structs.replace(rejected(ticket, attempt), sample=sample))
        return [*answers, failed(ticket, ticket.attempts)]

    def _ready(self, ticket: DesignTicket, program: DesignSample, sample: str) -> Message:
        hint = None if self._happens(self._luck.no_hint) else HINT
        fact = ready(
            ticket, attempt=program.attempt, hint=hint, degenerate=self._happens(self._luck.degenerate)
        )
        flag = "off_ticket" if self._happens(self._luck.flagged) else ""
        finding = msgspec.structs.replace(fact.finding, flag=flag)
        return msgspec.structs.replace(fact, sample=sample, finding=finding)

    def play(self, request: EpisodeRequest, versions: tuple[int, ...]) -> list[Message]:
        """Play an episode, or fail to. A hint that tells is one of its design, in all of its plays."""
        if self._happens(self._luck.infra):
            return [lost(request, "infra")]
        if self._happens(self._luck.quarantined):
            return [lost(request, "quarantined")]
        told = random.Random(request.design).random() < self._luck.told and request.arm == "hinted"
        broken = self._happens(self._luck.env)
        truncated = not told and self._happens(self._luck.truncated)
        won = float(told or self._happens(0.5))
        if self._happens(self._luck.partly):
            won = self._chance.choice([0.95, 0.5, -1.0])
        sample = EpisodeSample(
            episode=request.episode,
            round=request.round,
            segments=self._tokens(versions),
        )
        masked = truncated and self._config.agent.truncated == "mask"
        trains = not masked and (request.arm == "plain" or self._config.learner.train_hinted)
        outcome = finished(
            request,
            0.0 if broken or truncated else won,
            failure="env" if broken else None,
            outcome="truncated" if truncated else "terminated",
            sample=sample.sample if trains else "",
            versions=(min(versions), max(versions)),
        )
        fact = msgspec.structs.replace(outcome, leaked=told and outcome.returned > 0)
        return [sample, fact] if trains else [fact]
