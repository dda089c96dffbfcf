"""Names, streams and consumers of a run, as data.

Only ``bus.provision`` creates them on a server. A subject is ``spade.<run>.<tail>``; the first token of
a tail decides the stream.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bus.errors import BusError

SECOND = 1_000_000_000
DAY = 86_400.0
# The server knows the id of a stored message for longer than a client waits for its acknowledgement.
DEDUPE_SECONDS = 1200.0
_RUN = re.compile(r"[a-z0-9_-]{1,64}")
_KEY = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*")


@dataclass(frozen=True)
class Stream:
    """One stream. ``share`` is its part of the store, ``seconds`` its age limit (0 = none).

    ``full``: ``wait`` refuses, so that publishers wait; ``forget`` drops the oldest message. Streams that a
    restart needs have no age limit. ``work``: it is a work queue. ``raw``: it holds bytes, not messages.
    ``expires``: a message may say how long it stays. ``hint`` is the remedy when it is full.
    """

    kind: str
    share: float
    full: Literal["wait", "forget"]
    work: bool = False
    seconds: float = 0.0
    per_subject: int = -1
    compress: bool = False
    raw: bool = False
    expires: bool = False
    hint: str = ""

    @property
    def head(self) -> str:
        """The first word of its tails."""
        return self.kind.lower()


@dataclass(frozen=True)
class Consumer:
    """One durable of a work queue. After ``attempts`` deliveries a message is poison (dead letter)."""

    name: str
    tails: str
    ack_seconds: float = 30.0
    attempts: int = 8


_TAKEN = "Work comes faster than it is done: this passes by itself while the roles that take it run."
_TRAINED = "It empties at the learner's checkpoints: does it run? One round must fit: raise bus.store_gb."
_NAMED = "Weights lie there (server.weights): raise bus.store_gb."
STREAMS: Mapping[str, Stream] = {
    stream.kind: stream
    for stream in (
        Stream("TASK", share=0.04, full="wait", work=True, hint=_TAKEN),
        Stream("EVENT", share=0.34, full="forget", compress=True),
        Stream("SAMPLE", share=0.46, full="wait", hint=_TRAINED),
        Stream("BLOB", share=0.1, full="wait", per_subject=1, raw=True, hint=_NAMED),
        Stream("STATE", share=0.005, full="wait", per_subject=1, raw=True),
        Stream("LEASE", share=0.005, full="wait", per_subject=1, raw=True, expires=True),
        Stream("DLQ", share=0.04, full="forget", seconds=30 * DAY),
    )
}
CONSUMERS: Mapping[str, Consumer] = {
    consumer.name: consumer
    for consumer in (Consumer("designer", "task.designer.>"), Consumer("agent", "task.agent.>"))
}
_HEADS = {stream.head: stream.kind for stream in STREAMS.values()}


@dataclass(frozen=True)
class Names:
    """All names of one run. Raises BusError when the run name is not one lower-case token."""

    run: str
    root: str = field(init=False)

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run):
            raise BusError(
                f"run name {self.run!r} cannot be part of a subject",
                remedy="Use 1 to 64 of a-z, 0-9, '-' and '_'.",
            )
        object.__setattr__(self, "root", f"spade.{self.run}.")

    def subject(self, tail: str) -> str:
        """Return the subject of a tail (wildcards allowed)."""
        return self.root + tail

    def tail(self, subject: str) -> str:
        """Return the tail of a subject."""
        return subject.removeprefix(self.root)

    def stream(self, kind: str) -> str:
        """Return the stream's name on the server. Raises BusError for an unknown kind."""
        if kind not in STREAMS:
            raise BusError(f"unknown stream {kind!r}", remedy=f"One of {', '.join(STREAMS)}.")
        return f"{kind}_{self.run}"

    def key(self, kind: str, key: str) -> str:
        """Return the subject of a key of STATE, LEASE or BLOB. Raises BusError for bad characters."""
        if not _KEY.fullmatch(key):
            raise BusError(f"key {key!r} has characters outside [A-Za-z0-9_=/.-]")
        return self.subject(f"{STREAMS[kind].head}.{key}")


def stream_of(tail: str) -> str:
    """Return the stream a tail belongs to. Raises BusError when it belongs to none."""
    head = tail.split(".", 1)[0]
    if head not in _HEADS:
        raise BusError(f"no stream holds {tail!r}", remedy=f"Tails begin with {', '.join(_HEADS)}.")
    return _HEADS[head]


def stream_config(names: Names, stream: Stream, *, store_bytes: int) -> dict[str, Any]:
    """Return the server's configuration of ``stream``."""
    return {
        "name": names.stream(stream.kind),
        "subjects": [names.subject(f"{stream.head}.>")],
        "retention": "workqueue" if stream.work else "limits",
        "storage": "file",
        "discard": "new" if stream.full == "wait" else "old",
        "max_msgs": 20_000 if stream.work else -1,
        "max_msgs_per_subject": stream.per_subject,
        "max_bytes": int(stream.share * store_bytes),
        "max_age": int(stream.seconds * SECOND),
        "duplicate_window": int(DEDUPE_SECONDS * SECOND),
        "compression": "s2" if stream.compress else "none",
        "allow_direct": True,
        "allow_msg_ttl": stream.expires,
    }


def consumer_config(names: Names, consumer: Consumer) -> dict[str, Any]:
    """Return the server's configuration of a durable. All instances of a role hold 4096 messages at most.

    The bus itself counts attempts: a message that the server stopped delivering would stay in a work queue
    without end.
    """
    return {
        "name": consumer.name,
        "durable_name": consumer.name,
        "filter_subject": names.subject(consumer.tails),
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "ack_wait": int(consumer.ack_seconds * SECOND),
        "max_deliver": -1,
        "max_ack_pending": 4096,
        "max_waiting": 8192,
    }
