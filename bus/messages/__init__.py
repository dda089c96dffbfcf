"""All messages that travel on the bus: one frozen Struct per subject.

Evolution is append-only: a released field keeps its name, type and meaning, and a new field has a default.
The wire tag (``kind``) carries the schema version. A role of your own registers its kinds with
:func:`register_message`; readers pass over facts of a kind that they do not know.
"""

from bus.messages.base import Message as Message
from bus.messages.base import register_message as register_message
from bus.messages.base import registered as registered
from bus.messages.base import stable_id as stable_id
from bus.messages.base import token as token
from bus.messages.control import DeadLetter as DeadLetter
from bus.messages.control import Heartbeat as Heartbeat
from bus.messages.control import RunOrdered as RunOrdered
from bus.messages.parts import Credit as Credit
from bus.messages.parts import EnvironmentStanding as EnvironmentStanding
from bus.messages.parts import EnvironmentState as EnvironmentState
from bus.messages.parts import Finding as Finding
from bus.messages.parts import Flag as Flag
from bus.messages.parts import Segment as Segment
from bus.messages.parts import Span as Span
from bus.messages.parts import ToolUse as ToolUse
from bus.messages.parts import Turn as Turn
from bus.messages.parts import WaysToWin as WaysToWin
from bus.messages.policy import EvaluationFinished as EvaluationFinished
from bus.messages.policy import PolicyPublished as PolicyPublished
from bus.messages.policy import ServerLost as ServerLost
from bus.messages.policy import ServerServing as ServerServing
from bus.messages.self_play import Arm as Arm
from bus.messages.self_play import BatchTrained as BatchTrained
from bus.messages.self_play import DesignFailed as DesignFailed
from bus.messages.self_play import DesignRejected as DesignRejected
from bus.messages.self_play import DesignSample as DesignSample
from bus.messages.self_play import DesignTicket as DesignTicket
from bus.messages.self_play import EnvironmentReady as EnvironmentReady
from bus.messages.self_play import EnvironmentScored as EnvironmentScored
from bus.messages.self_play import EpisodeFailed as EpisodeFailed
from bus.messages.self_play import EpisodeFinished as EpisodeFinished
from bus.messages.self_play import EpisodeRequest as EpisodeRequest
from bus.messages.self_play import EpisodeSample as EpisodeSample
from bus.messages.self_play import FailureKind as FailureKind
from bus.messages.self_play import Outcome as Outcome
from bus.messages.self_play import Role as Role
from bus.messages.self_play import RoundClosed as RoundClosed
from bus.messages.self_play import RoundSummary as RoundSummary
from bus.messages.self_play import program_subject as program_subject
