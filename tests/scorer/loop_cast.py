"""Who answers in the loop: designers and agents that are lucky or not, and write hints that help or tell."""

from __future__ import annotations

import random
from functools import lru_cache

import msgspec
from learner_fakes import segment
from scorer_world import failed, finished, lost, ready, rejected

from bus.messages import DesignTicket, EpisodeRequest, HeldDesign, Message, Segment, Turn
from engine.config import Config

HINT = "look left"


class Luck(msgspec.Struct, frozen=True):
    """How often a thing happens when it could. ``crashes`` bounds those of the scorer and of the learner.
    ``told`` is how often a hint plays its game, ``partly`` how often a return is neither 0 nor 1.
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
    """Designers and agents. ``held`` are the tokens of designs in DESIGN, by subject."""

    def __init__(self, config: Config, chance: random.Random, luck: Luck) -> None:
        self._config, self._chance, self._luck = config, chance, luck

    def _happens(self, probability: float) -> bool:
        return self._chance.random() < probability

    def design(
        self, ticket: DesignTicket, versions: tuple[int, ...], held: dict[str, HeldDesign]
    ) -> list[Message]:
        """Try to write a design; whatever is tried once more finds what was held before."""
        answers: list[Message] = []
        settings = self._config.designer
        for attempt in range(ticket.attempts):
            if self._happens(self._luck.infra):
                return [*answers, failed(ticket, attempt, failure="infra")]
            written = HeldDesign(
                design=ticket.design,
                cohort=ticket.cohort,
                attempt=attempt,
                skill=ticket.skill,
                valid=not self._happens(self._luck.rejected),
                segments=tokens(versions, 2),
            )
            written = held.get(written.tail, written)
            if settings.kind == "policy" and (written.valid or settings.invalid == "penalise"):
                held[written.tail] = written
            if written.valid:
                return [*answers, self._ready(ticket, written, held)]
            answers.append(rejected(ticket, attempt))
        return [*answers, failed(ticket, ticket.attempts)]

    def _ready(self, ticket: DesignTicket, program: HeldDesign, held: dict[str, HeldDesign]) -> Message:
        hint = None if self._happens(self._luck.no_hint) else HINT
        trains = hint is not None and self._config.designer.hint_train and program.tail in held
        if trains:
            written = msgspec.structs.replace(program, part="hint")
            held.setdefault(written.tail, written)
        degenerate = self._happens(self._luck.degenerate)
        return msgspec.structs.replace(
            ready(ticket, attempt=program.attempt, hint=hint, degenerate=degenerate),
            hint_held=trains,
            flag="off_ticket" if self._happens(self._luck.flagged) else "",
        )

    def play(self, request: EpisodeRequest, versions: tuple[int, ...]) -> Message:
        """Play an episode, or fail to. A hint that tells is one of its design, in all of its plays."""
        if self._happens(self._luck.infra):
            return lost(request, "infra")
        if self._happens(self._luck.quarantined):
            return lost(request, "quarantined")
        told = random.Random(request.design).random() < self._luck.told and request.arm == "hinted"
        broken = self._happens(self._luck.env)
        truncated = not told and self._happens(self._luck.truncated)
        won = float(told or self._happens(0.5))
        if self._happens(self._luck.partly):
            won = self._chance.choice([0.95, 0.5, -1.0])
        outcome = finished(
            request,
            0.0 if broken or truncated else won,
            failure="env" if broken else None,
            outcome="truncated" if truncated else "terminated",
            segments=tokens(versions, self._chance.randint(1, 3)),
        )
        turn = Turn("Which way?", "", "left", won)
        return msgspec.structs.replace(outcome, transcript=(turn,) if told else (turn, turn))
