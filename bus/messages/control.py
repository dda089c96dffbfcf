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
    key_form: ClassVar[str] = "dead:{m.source}:{m.sequence}"
    source: str
    sequence: int
    subject: str
    reason: str
    attempts: int
    frame: bytes

    @property
    def tail(self) -> str:
        return f"dlq.{self.source.lower()}"


@register_message
class RunOrdered(Message, frozen=True, kw_only=True, tag="run_ordered.v1"):
    """An order to ``roles`` (all when empty), stored as a fact, so that no role misses it.

    ``pause`` and ``resume`` of the scorer stop and continue the admission of rounds.
    ``closing``: it is part of the end of the run, so no role begins work. ``at`` is the wall clock (ns).
    """

    key_form: ClassVar[str] = "ordered:{m.at}"
    tail_form: ClassVar[str] = "event.supervisor.ordered"
    command: Literal["drain", "resume", "pause"]
    at: int
    roles: tuple[str, ...] = ()
    closing: bool = False


@register_message
class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat.v1"):
    """Progress of one role instance, once a second on core NATS: ``statistics`` are its gauges."""

    stream: ClassVar[str] = ""
    key_form: ClassVar[str] = "heartbeat:{m.role}:{m.instance}"
    tail_form: ClassVar[str] = "hb.{m.role}.{m.instance}"
    role: str
    instance: str
    state: Literal["starting", "running", "draining", "stopped"]
    statistics: dict[str, float]
