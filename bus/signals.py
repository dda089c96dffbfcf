"""Messages that are no part of the science: control, heartbeats, and what could not be delivered."""

from __future__ import annotations

from typing import ClassVar, Literal

from bus.parts import Message


class DeadLetter(Message, frozen=True, kw_only=True, tag="dead_letter.v1"):
    """A message that nobody could use, kept with its bytes. ``source`` is the stream it lay in,
    ``subject`` its tail there, ``frame`` its bytes as stored, ``attempts`` how often it was delivered."""

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


class Control(Message, frozen=True, kw_only=True, tag="control.v1"):
    """A command to ``roles``, to all when empty (core NATS, not stored; the last value also lies in the
    state bucket)."""

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
