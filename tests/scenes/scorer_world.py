"""A scripted world around the curriculum: designers, agents, a learner and servers without any task.

It answers commands with events in an order drawn from a generator, and holds what the curriculum said, so
that saying something else under the same name is caught.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import msgspec

from bus.messages import (
    BatchTrained,
    Credit,
    DesignFailed,
    DesignRejected,
    DesignTicket,
    EnvironmentReady,
    EnvironmentScored,
    EpisodeFailed,
    EpisodeFinished,
    EpisodeRequest,
    Finding,
    Message,
    PolicyPublished,
    RoundClosed,
    RoundSummary,
    ServerLost,
    ServerServing,
)
from engine.config import Config
from engine.lineage import Version
from roles.scorer.curriculum import Curriculum
from roles.scorer.state import Command, MarkFlushed, Publish


def config(
    *,
    steps: int = 6,
    curriculum: dict[str, Any] | None = None,
    reward: dict[str, Any] | None = None,
    learner: dict[str, Any] | None = None,
    designer: dict[str, Any] | None = None,
    agent: dict[str, Any] | None = None,
) -> Config:
    """Return a small recipe with the given values in its tables. Its KL term gives each sample a gradient."""
    small = {"environments": 4, "rounds_per_window": 2, "delay": 2, "plays_per_round": 2, "hinted_plays": 2}
    bounds = {
        "designer": {
            "max_staleness": 64,
            "normalise": "centre",
            "scope": "skill",
            "advantage_scale": 1.0,
        },
        "agent": {"max_staleness": 64},
        "kl": 0.01,
    }
    return msgspec.convert(
        {
            "run": {"name": "test", "steps": steps},
            "model": {"path": "none"},
            "curriculum": small | (curriculum or {}),
            "reward": reward or {},
            "learner": bounds | (learner or {}),
            "designer": {"skills": ["Logic", "Optimization"]} | (designer or {}),
            "agent": agent or {},
        },
        Config,
    )


def name_of(command: Command) -> str:
    """Return what identifies a command: the same name must always say the same."""
    match command:
        case Publish(message):
            return message.key
        case MarkFlushed(steps):
            return f"flushed:{len(steps)}"
    raise AssertionError(command)


class CreditedDesign(NamedTuple):
    """A designer sample with its credit."""

    design: str
    attempt: int
    valid: bool
    part: str
    cohort: int
    group: str
    reward: float
    advantage: float
    members: int


@dataclass
class Chances:
    """How often things go wrong."""

    rejected: float = 0.2
    design_failed: float = 0.1
    no_hint: float = 0.1
    degenerate: float = 0.1
    infra: float = 0.1
    quarantined: float = 0.03
    duplicate: float = 0.1
    env: float = 0.05
    refork: float = 0.03
    server_lost: float = 0.03
    truncated: float = 0.05
    told: float = 0.1


QUIET = Chances(*[0] * len(fields(Chances)))


@dataclass
class World:
    """``log`` is EVENT: (sequence, message). ``said`` maps the name of a command to the command."""

    config: Config
    random: random.Random
    chances: Chances = field(default_factory=Chances)
    servers: int = 1
    log: list[tuple[int, Message]] = field(default_factory=list)
    said: dict[str, Command] = field(default_factory=dict)
    given: dict[int, list[Command]] = field(default_factory=dict)
    tickets: dict[str, DesignTicket] = field(default_factory=dict)
    requests: dict[str, EpisodeRequest] = field(default_factory=dict)
    closed: list[RoundClosed] = field(default_factory=list)
    scored: dict[str, EnvironmentScored] = field(default_factory=dict)
    summaries: dict[int, RoundSummary] = field(default_factory=dict)
    written: dict[str, tuple[str, int, bool, str, int]] = field(default_factory=dict)
    plays: dict[str, EpisodeFinished] = field(default_factory=dict)
    groups: dict[str, list[Credit]] = field(default_factory=dict)
    designs: dict[str, tuple[int, CreditedDesign]] = field(default_factory=dict)
    requested: list[EpisodeRequest] = field(default_factory=list)
    flushed: tuple[int, ...] = ()
    trained: int = 0
    version: Version = field(default_factory=lambda: Version(1, 0))
    serving: dict[str, Version] = field(default_factory=dict)
    epochs: int = 0

    def execute(self, commands: Iterable[Command]) -> None:
        """Carry out commands as the shell would; repeating one is harmless, contradicting it is not."""
        for command in commands:
            name = name_of(command)
            if name in self.said:
                assert self.said[name] == command, name
                continue
            self.said[name] = command
            match command:
                case Publish(message):
                    self._store(message)
                case MarkFlushed(steps):
                    self.flushed = steps

    def _store(self, message: Message) -> None:
        match message:
            case DesignTicket():
                self.tickets[message.design] = message
            case EpisodeRequest():
                self.requests[message.episode] = message
                self.requested.append(message)
            case RoundClosed():
                assert message.round == len(self.closed), "rounds close in order, once"
                self.closed.append(message)
                self._credit(message)
            case EnvironmentScored():
                self.scored[message.design] = message
            case RoundSummary():
                self.summaries[message.round] = message
            case _:
                raise AssertionError(message)

    def _credit(self, message: RoundClosed) -> None:
        """Each sample is credited once, and was stored before."""
        for credit in message.credits:
            if credit.role == "agent":
                assert self.plays[credit.sample].round == message.round
                self.groups.setdefault(credit.group, []).append(credit)
            else:
                assert credit.sample not in self.designs
                made = self.written[credit.sample]
                self.designs[credit.sample] = (
                    message.round,
                    CreditedDesign(*made, credit.group, credit.reward, credit.advantage, credit.members),
                )
        names = [credit.sample for credit in message.credits]
        assert len(set(names)) == len(names)

    def _note(self, message: Message) -> None:
        """Remember the samples that a fact names."""
        match message:
            case EpisodeFinished() if message.sample:
                self.plays[message.sample] = message
            case EnvironmentReady():
                made = (message.design, message.attempt, True)
                self.written[message.sample] = (*made, "", message.cohort)
                self.written[message.hint_sample] = (*made, "hint", message.cohort)
            case DesignRejected():
                self.written.setdefault(
                    message.sample, (message.design, message.attempt, False, "", message.cohort)
                )

    def tell(self, machine: Curriculum, message: Message) -> None:
        """Append an event to the log, feed it, carry out the answer."""
        sequence = len(self.log) + 1
        self.log.append((sequence, message))
        self._note(message)
        commands = machine.apply(sequence, message)
        self.given[sequence] = commands
        self.execute(commands)

    def begin(self, machine: Curriculum) -> None:
        """Start the machine, the learner and the servers."""
        self.execute(machine.start())
        self.tell(machine, published(self.version))
        for number in range(self.servers):
            self.serve(machine, f"s{number}")

    def serve(self, machine: Curriculum, server: str) -> None:
        """Let a server answer with the learner's newest version."""
        self.serving[server] = self.version
        self.tell(machine, serving(server, self.version, f"e{self.epochs}"))

    def actions(self) -> list[Callable[[Curriculum], None]]:
        """Return what could happen next."""
        result: list[Callable[[Curriculum], None]] = [
            *(partial(self.design, ticket=ticket) for ticket in self.tickets.values()),
            *(partial(self.play, request=request) for request in self.requests.values()),
        ]
        if self.trained < len(self.closed):
            result.append(self.train)
        stale = [server for server, version in self.serving.items() if version != self.version]
        return result + [partial(self.serve, server=server) for server in stale]

    def run(self, machine: Curriculum, *, limit: int = 100_000) -> None:
        """Let things happen until nothing is left to do, or ``limit`` things have happened."""
        for _ in range(limit):
            actions = self.actions()
            if not actions:
                return
            self.random.choice(actions)(machine)
            if self.log and self.random.random() < self.chances.duplicate:
                self.tell(machine, self.random.choice(self.log)[1])
                self._resync(machine)

    def _resync(self, machine: Curriculum) -> None:
        """A repeated announcement may be old news: servers say again what they really answer with."""
        last = self.log[-1][1]
        if isinstance(last, ServerServing | ServerLost):
            for server in list(self.serving):
                self.serve(machine, server)

    def design(self, machine: Curriculum, ticket: DesignTicket) -> None:
        """Answer a ticket, design by design."""
        del self.tickets[ticket.design]
        for part in ticket.parts():
            self._answer(machine, part)

    def _answer(self, machine: Curriculum, ticket: DesignTicket) -> None:
        """Answer one design of a ticket, perhaps after refused attempts."""
        if self.random.random() < self.chances.infra:
            self.tell(machine, failed(ticket, 0, failure="infra"))
            return
        attempt = 0
        while attempt < ticket.attempts and self.random.random() < self.chances.rejected:
            self.tell(machine, rejected(ticket, attempt))
            attempt += 1
        if attempt == ticket.attempts or self.random.random() < self.chances.design_failed:
            self.tell(machine, failed(ticket, attempt))
            return
        hint = None if self.random.random() < self.chances.no_hint else "look left"
        degenerate = self.random.random() < self.chances.degenerate
        trains = hint is not None and self.config.designer.hint_train
        fact = ready(ticket, attempt=attempt, hint=hint, degenerate=degenerate, hint_held=trains)
        self.tell(machine, fact)

    def play(self, machine: Curriculum, request: EpisodeRequest) -> None:
        """Play an episode, or fail to."""
        del self.requests[request.episode]
        draw = self.random.random()
        if draw < self.chances.infra:
            self.tell(machine, lost(request, "infra"))
        elif draw < self.chances.infra + self.chances.quarantined:
            self.tell(machine, lost(request, "quarantined"))
        elif draw < self.chances.infra + self.chances.quarantined + self.chances.env:
            self.tell(machine, finished(request, -1.0, failure="env"))
        elif self.random.random() < self.chances.truncated:
            masked = self.config.agent.truncated == "mask"
            self.tell(machine, finished(request, 0.0, outcome="truncated", masked=masked))
        elif request.arm == "hinted" and random.Random(request.design).random() < self.chances.told:
            self.tell(machine, msgspec.structs.replace(finished(request, 1.0), leaked=True))
        else:
            self.tell(machine, finished(request, float(self.random.random() < 0.5)))

    def train(self, machine: Curriculum) -> None:
        """Train the next closed round, or crash and go back to the checkpoint of an earlier one."""
        if self.trained and self.random.random() < self.chances.refork:
            self.version = Version(self.version.fence + 1, max(0, self.version.step - 1))
            self.trained -= 1
            self.tell(machine, published(self.version))
            return
        batch = self.closed[self.trained]
        self.version = Version(self.version.fence, self.version.step + 1)
        self.trained += 1
        self.tell(machine, published(self.version))
        self.tell(machine, trained(batch.round, self.version, final=batch.final))
        if self.random.random() < self.chances.server_lost:
            server = self.random.choice(list(self.serving))
            self.tell(machine, ServerLost(server=server, epoch=f"e{self.epochs}", reason="gone"))
            self.epochs += 1
            for name in list(self.serving):
                self.serve(machine, name)


def published(version: Version) -> PolicyPublished:
    return PolicyPublished(
        version=version.pack(),
        step=version.step,
        uri="",
        sha256="",
        size=0,
        canary_tokens=b"",
        canary_logprobs=b"",
    )


def serving(server: str, version: Version, epoch: str = "e0") -> ServerServing:
    return ServerServing(
        server=server,
        epoch=epoch,
        url="http://127.0.0.1:1",
        version=version.pack(),
        canary_error=0.0,
        seconds=0.0,
    )


def trained(round_: int, version: Version, *, final: bool = False) -> BatchTrained:
    return BatchTrained(
        round=round_,
        step=version.step,
        version=version.pack(),
        trained=(),
        dropped=(),
        agent_samples=0,
        designer_samples=0,
        max_staleness=0,
        mean_staleness=0.0,
        metrics={},
        seconds=0.0,
        final=final,
    )


def ready(
    ticket: DesignTicket,
    *,
    attempt: int = 0,
    hint: str | None = "look left",
    degenerate: bool = False,
    hint_held: bool = False,
) -> EnvironmentReady:
    sample = f"{ticket.design}-{attempt}.{ticket.issue}"
    return EnvironmentReady(
        sample=sample,
        hint_sample=f"{sample}-hint" if hint_held else "",
        design=ticket.design,
        cohort=ticket.cohort,
        slot=ticket.slot,
        attempt=attempt,
        skill=ticket.skill,
        environment=f"sha-{ticket.design}",
        source="class TestEnv: ...",
        hint=hint,
        document="",
        finding=Finding(title="t", degenerate=degenerate),
        difficulty=2.0,
    )


def rejected(ticket: DesignTicket, attempt: int) -> DesignRejected:
    return DesignRejected(
        sample=f"{ticket.design}-{attempt}.{ticket.issue}-refused",
        design=ticket.design,
        cohort=ticket.cohort,
        attempt=attempt,
        skill=ticket.skill,
        rung="syntax",
        reason="no",
        source="",
        document="",
    )


def failed(ticket: DesignTicket, attempts: int, *, failure: Any = "policy") -> DesignFailed:
    return DesignFailed(
        design=ticket.design,
        cohort=ticket.cohort,
        skill=ticket.skill,
        attempts=attempts,
        failure=failure,
        reason="no",
        issue=ticket.issue,
    )


def finished(
    request: EpisodeRequest,
    returned: float,
    *,
    failure: Any = None,
    outcome: Any = "terminated",
    masked: bool = False,
    sample: str | None = None,
    versions: tuple[int, int] | None = None,
) -> EpisodeFinished:
    name = f"tokens-{request.episode}" if sample is None else sample
    return EpisodeFinished(
        sample="" if masked else name,
        tokens=5,
        versions=versions,
        episode=request.episode,
        design=request.design,
        arm=request.arm,
        round=request.round,
        index=request.index,
        seed=request.seed,
        returned=returned,
        outcome=outcome,
        failure=failure,
        reason="",
        turns=1,
        seconds=0.0,
    )


def lost(request: EpisodeRequest, failure: Any) -> EpisodeFailed:
    return EpisodeFailed(
        episode=request.episode,
        design=request.design,
        arm=request.arm,
        round=request.round,
        index=request.index,
        failure=failure,
        reason="",
    )
