"""Two looks at a bus in, rates and shares out. Pure: no clock, no socket.

A sample holds what the server counted at one moment; :func:`compare` makes figures of two of them. What
appeared in between has no rate yet.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class StreamSample(msgspec.Struct, frozen=True, kw_only=True):
    """State of one stream. Limits are 0 when there is none; times are seconds since the epoch, or None."""

    stream: str
    messages: int
    bytes: int
    first: int
    last: int
    limit_bytes: int = 0
    limit_messages: int = 0
    first_at: float | None = None
    last_at: float | None = None


class ConsumerSample(msgspec.Struct, frozen=True, kw_only=True):
    """State of one consumer; ``delivered`` counts deliveries, ``oldest_at`` is when the oldest message
    was stored that it has not finished, ``client`` the connection that reads through it (empty for a
    durable, which many may share).
    """

    stream: str
    consumer: str
    client: str = ""
    kind: Literal["queue", "reader"]
    pending: int
    ack_pending: int
    redelivered: int
    waiting: int
    delivered: int
    oldest_at: float | None = None


class ClientSample(msgspec.Struct, frozen=True, kw_only=True):
    """One connection as the server counts it: what the client sent (``in_``) and was sent (``out_``).

    ``id`` is the server's number of the connection.
    """

    id: str
    role: str
    instance: str
    rtt_ms: float | None
    active_at: float | None
    pending_bytes: int
    in_messages: int
    out_messages: int
    in_bytes: int
    out_bytes: int


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The last heartbeat of a role instance, and when it was heard."""

    role: str
    instance: str
    state: str
    at: float


class PresentFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Who says to be there: ``up_s`` seconds since its start, ``age_s`` since it said so. ``version`` is the
    packed policy version, None when it works with none.
    """

    role: str
    instance: str
    state: str
    slots: int
    version: int | None
    capabilities: tuple[str, ...]
    host: str
    up_s: float | None
    age_s: float


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a bus. ``clients`` is None when the server does not tell about connections."""

    run: str
    at: float
    server: str
    streams: tuple[StreamSample, ...]
    consumers: tuple[ConsumerSample, ...]
    clients: tuple[ClientSample, ...] | None
    beats: tuple[Beat, ...]
    present: tuple[PresentFigures, ...] = ()


class StreamFigures(msgspec.Struct, frozen=True, kw_only=True):
    """``share`` is the larger part of its limits that a stream uses; rates are messages a second."""

    stream: str
    messages: int
    bytes: int
    share: float | None
    limit_bytes: int
    limit_messages: int
    first: int
    last: int
    in_per_s: float | None
    out_per_s: float | None
    last_age_s: float | None
    first_age_s: float | None


class ConsumerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A ``queue`` is a durable whose work is acknowledged, a ``reader`` follows a stream
    for one ``client`` (role/instance, empty when it does not say).
    """

    stream: str
    consumer: str
    client: str
    kind: Literal["queue", "reader"]
    pending: int
    ack_pending: int
    redelivered: int
    waiting: int
    out_per_s: float | None
    oldest_age_s: float | None


class ClientFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A connection, a role that is only heard of, or both; what is not known is None."""

    role: str
    instance: str
    state: str | None
    heard_s: float | None
    rtt_ms: float | None
    idle_s: float | None
    pending_bytes: int | None
    in_per_s: float | None
    out_per_s: float | None
    in_bytes_per_s: float | None
    out_bytes_per_s: float | None


class Top(msgspec.Struct, frozen=True, kw_only=True):
    """All of `spade bus top`. ``interval_s`` is the time the rates cover, None with a single look."""

    run: str
    live: bool
    server: str
    time: float
    interval_s: float | None
    dead_letters: int
    event_age_s: float | None
    streams: tuple[StreamFigures, ...]
    consumers: tuple[ConsumerFigures, ...]
    clients: tuple[ClientFigures, ...]
    clients_known: bool
    present: tuple[PresentFigures, ...] = ()


def compare(sample: Sample, before: Sample | None, *, live: bool = True) -> Top:
    """Return the figures of ``sample``; the rates are those since ``before``."""
    seconds = sample.at - before.at if before is not None and sample.at > before.at else None
    events = [stream for stream in sample.streams if stream.stream == "EVENT"]
    letters = [stream.messages for stream in sample.streams if stream.stream == "DLQ"]
    return Top(
        run=sample.run,
        live=live,
        server=sample.server,
        time=sample.at,
        interval_s=seconds,
        dead_letters=sum(letters),
        event_age_s=_age(sample.at, events[0].last_at) if events else None,
        streams=_streams(sample, before, seconds),
        consumers=_consumers(sample, before, seconds),
        clients=_clients(sample, before, seconds),
        clients_known=sample.clients is not None,
        present=sample.present,
    )


def share(sample: StreamSample) -> float | None:
    """Return the part of its tightest limit that a stream uses, None without a limit."""
    parts = [
        used / limit
        for used, limit in (
            (sample.bytes, sample.limit_bytes),
            (sample.messages, sample.limit_messages),
        )
        if limit > 0
    ]
    return max(parts, default=None)


def _streams(sample: Sample, before: Sample | None, seconds: float | None) -> tuple[StreamFigures, ...]:
    old = {stream.stream: stream for stream in before.streams} if before else {}
    out: dict[str, float] = {}
    for consumer in _consumers(sample, before, seconds):
        if consumer.out_per_s is not None:
            out[consumer.stream] = out.get(consumer.stream, 0.0) + consumer.out_per_s
    return tuple(
        StreamFigures(
            stream=now.stream,
            messages=now.messages,
            bytes=now.bytes,
            share=share(now),
            limit_bytes=now.limit_bytes,
            limit_messages=now.limit_messages,
            first=now.first,
            last=now.last,
            in_per_s=_rate(now.last, old[now.stream].last if now.stream in old else None, seconds),
            out_per_s=out.get(now.stream, 0.0) if seconds is not None else None,
            last_age_s=_age(sample.at, now.last_at),
            first_age_s=_age(sample.at, now.first_at),
        )
        for now in sample.streams
    )


def _consumers(sample: Sample, before: Sample | None, seconds: float | None) -> tuple[ConsumerFigures, ...]:
    old = {(one.stream, one.consumer): one.delivered for one in before.consumers} if before else {}
    return tuple(
        ConsumerFigures(
            stream=now.stream,
            consumer=now.consumer,
            client=now.client,
            kind=now.kind,
            pending=now.pending,
            ack_pending=now.ack_pending,
            redelivered=now.redelivered,
            waiting=now.waiting,
            out_per_s=_rate(now.delivered, old.get((now.stream, now.consumer)), seconds),
            oldest_age_s=_age(sample.at, now.oldest_at),
        )
        for now in sorted(sample.consumers, key=lambda one: (one.stream, one.kind, one.client, one.consumer))
    )


def _clients(sample: Sample, before: Sample | None, seconds: float | None) -> tuple[ClientFigures, ...]:
    old = {one.id: one for one in (before.clients if before and before.clients else ())}
    beats = {(beat.role, beat.instance): beat for beat in sample.beats}
    connected = [
        _client(sample.at, now, old.get(now.id), beats.get((now.role, now.instance)), seconds)
        for now in sample.clients or ()
    ]
    shown = {(one.role, one.instance) for one in connected}
    heard = [_heard(sample.at, beat) for key, beat in beats.items() if key not in shown]
    return tuple(sorted([*connected, *heard], key=lambda one: (one.role, one.instance)))


def _client(
    at: float, now: ClientSample, old: ClientSample | None, beat: Beat | None, seconds: float | None
) -> ClientFigures:
    def rate(name: str) -> float | None:
        return _rate(getattr(now, name), getattr(old, name) if old else None, seconds)

    return ClientFigures(
        role=now.role,
        instance=now.instance,
        state=beat.state if beat else None,
        heard_s=_age(at, beat.at) if beat else None,
        rtt_ms=now.rtt_ms,
        idle_s=_age(at, now.active_at),
        pending_bytes=now.pending_bytes,
        in_per_s=rate("in_messages"),
        out_per_s=rate("out_messages"),
        in_bytes_per_s=rate("in_bytes"),
        out_bytes_per_s=rate("out_bytes"),
    )


def _heard(at: float, beat: Beat) -> ClientFigures:
    return ClientFigures(
        role=beat.role,
        instance=beat.instance,
        state=beat.state,
        heard_s=_age(at, beat.at),
        rtt_ms=None,
        idle_s=None,
        pending_bytes=None,
        in_per_s=None,
        out_per_s=None,
        in_bytes_per_s=None,
        out_bytes_per_s=None,
    )


def _age(now: float, at: float | None) -> float | None:
    """Clocks of hosts differ: an age is never negative."""
    return None if at is None else max(now - at, 0.0)


def _rate(now: int, before: int | None, seconds: float | None) -> float | None:
    """Counters that went back belong to something new of the same name."""
    if before is None or seconds is None or now < before:
        return None
    return (now - before) / seconds
