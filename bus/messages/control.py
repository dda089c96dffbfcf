"""Messages that are no part of the science: orders, heartbeats, and what could not be delivered."""

from __future__ import annotations

from typing import ClassVar, Literal

from bus.messages.base import Message, register_message


@register_message
class DeadLetter(Message, frozen=True, kw_only=True, tag="dead_letter.v1"):
    """A message that could not be used, kept with its bytes.

    ``source`` is the stream it lay in, ``subject`` its tail there, ``frame`` its bytes as stored,
    ``attempts`` how often it was delivered.
    """

    stream: ClassVar[str] = "DLQ"
    source: str
    sequence: int
    subject: str
    reason: str
    attempts: int
    frame: bytes

    @property
    def key(self) -> str:
        return f"dead:{self.source}:{self.sequence}"

    @property
    def tail(self) -> str:
        return f"dlq.{self.source.lower()}"


@register_message
class RunOrdered(Message, frozen=True, kw_only=True, tag="run_ordered.v1"):
    """An order to ``roles`` (all when empty), stored as a fact, so that no role misses it.

    ``closing``: it is part of the end of the run, so no role begins work. ``at`` is the wall clock (ns).
    """

    stream: ClassVar[str] = "EVENT"
    command: Literal["drain", "resume"]
    at: int
    roles: tuple[str, ...] = ()
    closing: bool = False

    @property
    def key(self) -> str:
        return f"ordered:{self.at}"

    @property
    def tail(self) -> str:
        return "event.supervisor.ordered"


@register_message
class Control(Message, frozen=True, kw_only=True, tag="control.v1"):
    """A command to ``roles``, to all when empty, for who listens at this moment (core NATS, not stored).

    Who must not miss it reads :class:`RunOrdered`, which says the same.
    """

    stream: ClassVar[str] = ""
    command: Literal["drain", "pause", "resume"]
    reason: str = ""
    roles: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"control:{self.command}"

    @property
    def tail(self) -> str:
        return "ctl.all"


@register_message
class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat.v1"):
    """Progress of one role instance, once a second on core NATS: ``statistics`` are its gauges."""

    stream: ClassVar[str] = ""
    role: str
    instance: str
    state: Literal["starting", "running", "draining", "stopped"]
    statistics: dict[str, float]

    @property
    def key(self) -> str:
        return f"heartbeat:{self.role}:{self.instance}"

    @property
    def tail(self) -> str:
        return f"hb.{self.role}.{self.instance}"
