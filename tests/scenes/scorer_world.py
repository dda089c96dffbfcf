"""A scripted world around the curriculum: designers, agents, a learner and servers without any task.

It holds what the curriculum said, so that saying something else under the same name is caught. The functions
at the end are what a test does to it: answer tickets, play, train, look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
    Message,
    PolicyPublished,
    RoundClosed,
    RoundSummary,
    ServerServing,
)
from engine.config import Config
from engine.lineage import Version
from roles.scorer.curriculum import Curriculum
from roles.scorer.state import Command, MarkFlushed, Publish
from scenes import small_run


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
    cohort: int
    group: str
    reward: float
    advantage: float
    members: int


@dataclass
class World:
    """``log`` is EVENT: (sequence, message). ``said`` maps the name of a command to the command."""

    config: Config
    servers: int = 1
    log: list[tuple[int, Message]] = field(default_factory=list)
    said: dict[str, Command] = field(default_factory=dict)
    given: dict[int, list[Command]] = field(default_factory=dict)
    tickets: dict[str, DesignTicket] = field(default_factory=dict)
    requests: dict[str, EpisodeRequest] = field(default_factory=dict)
    closed: list[RoundClosed] = field(default_factory=list)
    scored: dict[str, EnvironmentScored] = field(default_factory=dict)
    summaries: dict[int, RoundSummary] = field(default_factory=dict)
    written: dict[str, tuple[str, int, bool, int]] = field(default_factory=dict)
    plays: dict[str, EpisodeFinished] = field(default_factory=dict)
    groups: dict[str, list[Credit]] = field(default_factory=dict)
    designs: dict[str, tuple[int, CreditedDesign]] = field(default_factory=dict)
    requested: list[EpisodeRequest] = field(default_factory=list)
    flushed: tuple[int, ...] = ()
    trained: int = 0
    version: Version = field(default_factory=lambda: Version(1, 0))
    serving: dict[str, Version] = field(default_factory=dict)

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
                self.written[message.sample] = (message.design, message.attempt, True, message.cohort)
            case DesignRejected():
                self.written.setdefault(
                    message.sample, (message.design, message.attempt, False, message.cohort)
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
        self.tell(machine, serving(server, self.version, "e0"))

    def train(self, machine: Curriculum) -> None:
        """Train the next closed round."""
        batch = self.closed[self.trained]
        self.version = Version(self.version.fence, self.version.step + 1)
        self.trained += 1
        self.tell(machine, published(self.version))
        self.tell(machine, trained(batch.round, self.version, final=batch.final))


def published(version: Version) -> PolicyPublished:
    return small_run.policy(version.step, version.fence)


def serving(server: str, version: Version, epoch: str = "e0") -> ServerServing:
    return small_run.serving(version.step, version.fence, server=server, epoch=epoch)


def trained(round_: int, version: Version, *, final: bool = False) -> BatchTrained:
    return small_run.batch(round_, version.step, version.fence, final=final)


def ready(
    ticket: DesignTicket, *, attempt: int = 0, hint: str | None = "look left", degenerate: bool = False
) -> EnvironmentReady:
    return small_run.ready(
        ticket.design,
        ticket.cohort,
        slot=ticket.slot,
        attempt=attempt,
        skill=ticket.skill,
        environment=f"sha-{ticket.design}",
        hint=hint,
        document="",
        degenerate=degenerate,
        difficulty=2.0,
        sample=f"{ticket.design}-{attempt}.{ticket.issue}",
    )


def rejected(ticket: DesignTicket, attempt: int) -> DesignRejected:
    sample = f"{ticket.design}-{attempt}.{ticket.issue}-refused"
    return small_run.rejected(ticket.design, attempt, cohort=ticket.cohort, skill=ticket.skill, sample=sample)


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
        returned=returned,
        outcome=outcome,
        failure=failure,
        reason="",
        turns=1,
        seconds=0.0,
    )


def lost(request: EpisodeRequest, failure: Any) -> EpisodeFailed:
    return request.failed(failure, "")


Win = Callable[[EpisodeRequest], float]


def start(recipe: Config, **fields: Any) -> tuple[World, Curriculum]:
    world = World(recipe, **fields)
    machine = Curriculum(recipe)
    world.begin(machine)
    return world, machine


def design_all(world: World, machine: Curriculum, **fields: Any) -> list[DesignTicket]:
    tickets = list(world.tickets.values())
    world.tickets.clear()
    for part in (part for ticket in tickets for part in ticket.parts()):
        world.tell(machine, msgspec.structs.replace(ready(part), **fields))
    return tickets


def play_all(world: World, machine: Curriculum, win: Win = lambda r: float(r.index % 2)) -> None:
    while world.requests:
        name, request = next(iter(world.requests.items()))
        del world.requests[name]
        world.tell(machine, finished(request, win(request)))


def step(world: World, machine: Curriculum, win: Win = lambda r: float(r.index % 2)) -> None:
    """Design and play what is asked for, train and serve what is closed."""
    design_all(world, machine)
    play_all(world, machine, win)
    while world.trained < len(world.closed):
        world.train(machine)
        for server in world.serving:
            world.serve(machine, server)


def active(world: World, round_: int) -> set[str]:
    return {request.design for request in world.requested if request.round == round_}
