"""All messages that travel on the bus: one frozen Struct per subject.

Evolution is append-only: a released field keeps its name, type and meaning, and a new field has a default.
The wire tag (``kind``) carries the schema version. A role of your own registers its kinds with
:func:`register_message`; readers pass over facts of a kind that they do not know.
"""

from bus.messages.base import Message, register_message, registered, stable_id, token
from bus.messages.control import DeadLetter, Heartbeat, RunOrdered
from bus.messages.parts import (
    Credit,
    EnvironmentStanding,
    EnvironmentState,
    Finding,
    Flag,
    Segment,
    Span,
    ToolUse,
    Turn,
    WaysToWin,
)
from bus.messages.policy import EvaluationFinished, PolicyPublished, ServerLost, ServerServing
from bus.messages.self_play import (
    Arm,
    BatchTrained,
    DesignFailed,
    DesignRejected,
    DesignSample,
    DesignTicket,
    EnvironmentReady,
    EnvironmentScored,
    EpisodeFailed,
    EpisodeFinished,
    EpisodeRequest,
    EpisodeSample,
    FailureKind,
    Outcome,
    Role,
    RoundClosed,
    RoundSummary,
    program_subject,
)

__all__ = [
    "Arm",
    "BatchTrained",
    "Credit",
    "DeadLetter",
    "DesignFailed",
    "DesignRejected",
    "DesignSample",
    "DesignTicket",
    "EnvironmentReady",
    "EnvironmentScored",
    "EnvironmentStanding",
    "EnvironmentState",
    "EpisodeFailed",
    "EpisodeFinished",
    "EpisodeRequest",
    "EpisodeSample",
    "EvaluationFinished",
    "FailureKind",
    "Finding",
    "Flag",
    "Heartbeat",
    "Message",
    "Outcome",
    "PolicyPublished",
    "Role",
    "RoundClosed",
    "RoundSummary",
    "RunOrdered",
    "Segment",
    "ServerLost",
    "ServerServing",
    "Span",
    "ToolUse",
    "Turn",
    "WaysToWin",
    "program_subject",
    "register_message",
    "registered",
    "stable_id",
    "token",
]
