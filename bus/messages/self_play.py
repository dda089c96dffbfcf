"""Messages of the self-play loop: tickets, environments, episodes, scores, samples and rounds."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from bus.messages.base import Message, register_message
from bus.messages.parts import (
    Credit,
    EnvironmentStanding,
    EnvironmentState,
    Finding,
    Segment,
    ToolUse,
    Turn,
    WaysToWin,
    sample_id,
)

Role = Literal["agent", "designer"]
Arm = Literal["plain", "hinted"]
FailureKind = Literal["infra", "env", "policy", "quarantined"]
Outcome = Literal["terminated", "truncated", "failed"]


def program_subject(environment: str) -> str:
    """Return the subject of the facts that hold the program with this SHA-256: its first 16 digits."""
    return f"event.designer.ready.{environment[:16]}"


def _again(issue: int) -> str:
    """Return what tells a repeated ticket, and the news of it, from the first one."""
    return f"-{issue}" if issue else ""


@register_message
class DesignTicket(Message, frozen=True, kw_only=True, tag="design_ticket.v1"):
    """Work for a designer: write one environment. ``target`` is the win rate wanted.

    ``number`` tickets come before this one in the run's plan, ``turn`` of them with the same skill.
    ``designs`` are the designs of a group, slot by slot from ``slot`` on, which share one prompt; empty: the
    one ``design``. ``issue`` counts how often the ticket was asked for again.
    """

    stream: ClassVar[str] = "TASK"
    design: str
    cohort: int
    slot: int
    skill: str
    seed: int
    attempts: int
    target: float
    round: int
    number: int = 0
    turn: int = 0
    designs: tuple[str, ...] = ()
    issue: int = 0

    @property
    def key(self) -> str:
        return f"ticket:{self.design}{_again(self.issue)}"

    @property
    def tail(self) -> str:
        return f"task.designer.design.{self.design}{_again(self.issue)}"

    def parts(self) -> tuple[DesignTicket, ...]:
        """Return the ticket of each design; they differ in ``design`` and ``slot`` only."""
        if not self.designs:
            return (self,)
        return tuple(
            msgspec.structs.replace(self, design=name, slot=self.slot + index, designs=())
            for index, name in enumerate(self.designs)
        )

    def failed(self, failure: FailureKind, reason: str) -> tuple[DesignFailed, ...]:
        """Return the news that each design of the ticket came to nothing."""
        return tuple(
            DesignFailed(
                design=part.design, cohort=part.cohort, skill=part.skill, attempts=part.attempts,
                failure=failure, reason=reason, issue=part.issue,
            )
            for part in self.parts()
        )  # fmt: skip


@register_message
class DesignSample(Message, frozen=True, kw_only=True, tag="design_sample.v1", omit_defaults=True):
    """The tokens of one attempt at a design. They wait in the learner's buffer for their credit.

    ``prompt`` names the template and its version that the attempt was asked with. ``part`` is the call that
    the tokens are of: "" for the program, "hint" for its hint. A designer that is not trained has no tokens:
    ``text`` is its reply then. With ``finding`` and ``wins`` a ticket that is delivered again is answered in
    the same way.
    """

    stream: ClassVar[str] = "SAMPLE"
    role: ClassVar[Role] = "designer"
    key_form: ClassVar[str] = "{m._attempt}:{m.sample}"
    tail_form: ClassVar[str] = "sample.designer.{m.cohort}.{m._attempt}"
    design: str
    cohort: int
    attempt: int
    skill: str
    valid: bool
    segments: tuple[Segment, ...]
    document: str = ""
    prompt: str = ""
    part: Literal["", "hint"] = ""
    text: str = ""
    finding: Finding = Finding()
    wins: WaysToWin = WaysToWin()

    @property
    def sample(self) -> str:
        """The id that the fact about the attempt names, and that its credit goes to."""
        return sample_id(self._attempt, self.segments)

    @property
    def _attempt(self) -> str:
        return f"{self.design}-{self.attempt}{self.part and '-' + self.part}"


@register_message
class DesignRejected(Message, frozen=True, kw_only=True, tag="design_rejected.v1"):
    """One attempt failed the validator: ``rung`` names the step, ``reason`` is for people.

    ``sample`` is the id of its tokens, "" where they are not trained.
    """

    key_form: ClassVar[str] = "rejected:{m.design}:{m.attempt}"
    tail_form: ClassVar[str] = "event.designer.rejected"
    design: str
    cohort: int
    attempt: int
    skill: str
    rung: str
    reason: str
    source: str
    document: str
    prompt: str = ""
    sample: str = ""


@register_message
class DesignFailed(Message, frozen=True, kw_only=True, tag="design_failed.v1"):
    """A design ended without an environment after ``attempts`` attempts at ``issue`` of its ticket."""

    tail_form: ClassVar[str] = "event.designer.failed"
    design: str
    cohort: int
    skill: str
    attempts: int
    failure: FailureKind
    reason: str
    issue: int = 0

    @property
    def key(self) -> str:
        return f"failed:{self.design}{_again(self.issue)}"


@register_message
class EnvironmentReady(Message, frozen=True, kw_only=True, tag="environment_ready.v1"):
    """A ticket was answered by a valid program. ``environment`` is the SHA-256 of ``source``.

    The last message on its subject is the one place of the program: requests name it by its digest. ``hint``
    is None when no acceptable hint was written: such a design has no regret term. ``difficulty`` is the level
    a classifier gives the program, None where there is no classifier; ``prompt`` names the template and its
    version that the program was asked for with. ``sample`` is the id of the tokens of the program, "" where
    they are not trained.
    """

    key_form: ClassVar[str] = "ready:{m.design}"
    design: str
    cohort: int
    slot: int
    attempt: int
    skill: str
    environment: str
    source: str
    hint: str | None
    document: str
    finding: Finding = Finding()
    difficulty: float | None = None
    family: str | None = None
    prompt: str = ""
    sample: str = ""

    @property
    def tail(self) -> str:
        return program_subject(self.environment)


@register_message
class EpisodeRequest(Message, frozen=True, kw_only=True, tag="episode_request.v1", omit_defaults=True):
    """Work for an agent: play one instance. The arms of a pair differ in ``hint`` and ``arm`` only.

    ``source`` is "" where the program is published (:func:`program_subject`), as it is in a run.
    """

    stream: ClassVar[str] = "TASK"
    key_form: ClassVar[str] = "request:{m.episode}"
    tail_form: ClassVar[str] = "task.agent.play.{m.episode}"
    episode: str
    design: str
    environment: str
    arm: Arm
    round: int
    index: int
    seed: int
    max_turns: int
    hint: str | None = None
    source: str = ""

    def failed(self, failure: FailureKind, reason: str) -> EpisodeFailed:
        """Return the news that the play came to nothing."""
        return EpisodeFailed(
            episode=self.episode, design=self.design, arm=self.arm, round=self.round, index=self.index,
            failure=failure, reason=reason,
        )  # fmt: skip


@register_message
class EpisodeFinished(Message, frozen=True, kw_only=True, tag="episode_finished.v1", omit_defaults=True):
    """A play came to its end. ``returned`` is the agent's return in [-1, 1].

    ``failure`` is ``env`` or ``policy`` when one of them ended the play, else None. Such a play has
    its defined value and stays in its group (invariant I5). ``tokens`` were sampled, by the policy
    ``versions`` (oldest, newest); they lie in SAMPLE under ``sample``, "" where they are not trained. The
    ``transcript`` is that of the first play that an agent won, and of the first that it did not, of a design
    and arm; the others have none. ``leaked``: the play was won by its only action, which its hint named.
    ``tool_use`` is None for a game.
    """

    key_form: ClassVar[str] = "episode:{m.episode}"
    tail_form: ClassVar[str] = "event.agent.finished"
    episode: str
    design: str
    arm: Arm
    round: int
    index: int
    returned: float
    outcome: Outcome
    turns: int
    seconds: float
    transcript: tuple[Turn, ...] = ()
    leaked: bool = False
    failure: FailureKind | None = None
    reason: str = ""
    sample: str = ""
    tokens: int = 0
    versions: tuple[int, int] | None = None
    tool_use: ToolUse | None = None


@register_message
class EpisodeFailed(Message, frozen=True, kw_only=True, tag="episode_failed.v1"):
    """A play has no outcome (infrastructure, quarantine): it leaves its group and is counted."""

    key_form: ClassVar[str] = "episode-failed:{m.episode}"
    tail_form: ClassVar[str] = "event.agent.failed"
    episode: str
    design: str
    arm: Arm
    round: int
    index: int
    failure: FailureKind
    reason: str


@register_message
class EnvironmentScored(Message, frozen=True, kw_only=True, tag="environment_scored.v1"):
    """A window closed. ``win`` is the mean plain return over the window, ``regret`` hinted - plain.

    ``noise_floor`` is the standard error that ``regret`` would have if the hint did nothing; ``turns`` is the
    mean length of a plain play. ``asked`` plain plays were wanted, ``plays`` of them have an outcome. Regret
    is measured on ``pairs``, of which ``pairs_apart`` have arms that no policy version sampled both of; the
    versions of each arm are (oldest, newest). ``regret_paid`` is the estimate that the reward used. A
    ``leak`` is a hint that holds the answer.
    """

    key_form: ClassVar[str] = "scored:{m.design}"
    tail_form: ClassVar[str] = "event.scorer.scored"
    design: str
    cohort: int
    environment: str
    skill: str
    document: str
    round: int
    plays: int
    hinted_plays: int
    win: float
    win_low: float
    win_high: float
    hinted: float | None
    regret: float | None
    regret_low: float | None
    regret_high: float | None
    plateau: float
    reward: float
    advantage: float
    state: EnvironmentState
    difficulty: float | None = None
    family: str | None = None
    noise_floor: float | None = None
    turns: float | None = None
    asked: int = 0
    pairs: int = 0
    pairs_apart: int = 0
    plain_versions: tuple[int, int] | None = None
    hinted_versions: tuple[int, int] | None = None
    regret_paid: float | None = None
    leak: bool = False


@register_message
class EpisodeSample(Message, frozen=True, kw_only=True, tag="episode_sample.v1"):
    """The tokens of one play, stored once, before the fact about it. Its credit comes with its ``round``."""

    stream: ClassVar[str] = "SAMPLE"
    role: ClassVar[Role] = "agent"
    key_form: ClassVar[str] = "{m.sample}"
    tail_form: ClassVar[str] = "sample.agent.{m.episode}"
    episode: str
    round: int
    segments: tuple[Segment, ...]

    @property
    def sample(self) -> str:
        """The id that the fact about the play names, and that its credit goes to."""
        return sample_id(self.episode, self.segments)


@register_message
class RoundClosed(Message, frozen=True, kw_only=True, tag="round_closed.v1"):
    """The credit of a round: the learner may form its batch. All samples of it precede this in the stream.

    ``plays`` and ``designs`` are the denominators of the loss: they count samples without variance too, which
    have a credit only where KL or entropy have a gradient. Samples of plays of this round and of cohorts
    below ``settled`` that have no credit by now never get one. ``play_tokens`` is how many tokens each play
    sampled, before any was left out. ``final`` marks the last batch of a run.
    """

    stream: ClassVar[str] = "SAMPLE"
    key_form: ClassVar[str] = "round:{m.round}"
    tail_form: ClassVar[str] = "sample.credit.{m.round}"
    round: int
    plays: int
    designs: int
    credits: tuple[Credit, ...]
    settled: int
    zero_variance_groups: int
    groups: int
    final: bool
    play_tokens: tuple[int, ...] = ()

    @property
    def agent_samples(self) -> int:
        """The number of plays with a credit."""
        return sum(credit.role == "agent" for credit in self.credits)

    @property
    def designer_samples(self) -> int:
        """The number of designs and hints with a credit."""
        return sum(credit.role == "designer" for credit in self.credits)


@register_message
class RoundSummary(Message, frozen=True, kw_only=True, tag="round_summary.v1"):
    """Figures of a round, for people: returns, validity, share of plays with a gradient.

    ``standings`` are the environments whose window goes on. ``lost`` plays have no outcome, ``partial``
    groups closed without one or more of theirs.
    """

    key_form: ClassVar[str] = "summary:{m.round}"
    tail_form: ClassVar[str] = "event.scorer.round"
    round: int
    environments: int
    accepted: int
    rejected: int
    plain: float | None
    hinted: float | None
    in_band: float | None
    gradient_share: float | None
    difficulty: float | None
    failures: dict[str, int]
    win_histogram: tuple[int, ...]
    reward: float | None = None
    standings: tuple[EnvironmentStanding, ...] = ()
    lost: int = 0
    partial: int = 0


@register_message
class BatchTrained(Message, frozen=True, kw_only=True, tag="batch_trained.v1"):
    """One batch reached its terminal state. ``step`` counts batches with samples along this lineage.

    ``dropped`` pairs a sample id with its cause. A round without any sample has ``trained`` empty and
    leaves ``step`` and ``version`` as they were.
    """

    key_form: ClassVar[str] = "trained:{m.version}:{m.round}"
    tail_form: ClassVar[str] = "event.learner.trained"
    round: int
    step: int
    version: int
    trained: tuple[str, ...]
    dropped: tuple[tuple[str, str], ...]
    agent_samples: int
    designer_samples: int
    max_staleness: int
    mean_staleness: float
    metrics: dict[str, float]
    seconds: float
    final: bool
