"""Asking a server what it counts: the thin side of `spade bus top`.

Everything comes from requests that any user with access to the JetStream API may make. Connections are
told by ``$SYS.REQ.ACCOUNT.PING.CONNZ``, which a server answers for the account that asks.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import anyio
import msgspec
import nats.errors
from nats.aio.msg import Msg

from bus import NatsBus, NotFound, reads
from bus.connection import status_of
from bus.interface import Present
from bus.mailbox import Mailbox
from bus.messages import Heartbeat
from bus.subjects import STREAMS
from engine.busview.figures import (
    Beat,
    ClientSample,
    ConsumerSample,
    PresentFigures,
    Sample,
    StreamSample,
)

BEATS = 512
_CONNECTIONS = "$SYS.REQ.ACCOUNT.PING.CONNZ"
_CONNECTIONS_LIMIT = 2048
_FIRST_SECONDS, _NEXT_SECONDS = 1.0, 0.15
_PAUSE_SECONDS = 30.0
_DURATION = re.compile(r"([\d.]+)(ns|us|µs|ms|h|m|s)")
_MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4, "h": 3.6e6}


class Probe:
    """Looks at one bus again and again. Made by :func:`probing`."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._beats: dict[tuple[str, str], Beat] = {}
        self._silent_until = 0.0

    async def sample(self) -> Sample:
        """Look once. Raises BusUnavailable."""
        streams: list[StreamSample] = []
        consumers: list[ConsumerSample] = []
        for kind in STREAMS:
            name = self._bus.names.stream(kind)
            try:
                info = await self._bus.connection.api(f"STREAM.INFO.{name}")
            except NotFound:
                continue  # a run of an older version has fewer streams
            streams.append(stream_sample(kind, info))
            if info["state"].get("consumer_count"):
                consumers += [
                    consumer_sample(self._bus.run, kind, one, await self._oldest(kind, one))
                    async for one in self._consumers(name)
                ]
        clients = await self._clients()
        version = self._bus.connection.client.connected_server_version
        return Sample(
            run=self._bus.run,
            at=time.time(),
            server=f"nats-server {version.major}.{version.minor}.{version.patch}",
            streams=tuple(streams),
            consumers=tuple(consumers),
            clients=clients,
            beats=tuple(self._beats.values()),
            present=await self._present(),
        )

    async def _present(self) -> tuple[PresentFigures, ...]:
        try:
            found = await self._bus.present()
        except NotFound:
            return ()  # a run of an older version has no list of who is there
        return tuple(present_figures(one) for one in found)

    def note(self, beat: Heartbeat) -> None:
        """Keep a heartbeat, of the newest ``BEATS`` instances."""
        key = (beat.role, beat.instance)
        self._beats.pop(key, None)
        self._beats[key] = Beat(role=beat.role, instance=beat.instance, state=beat.state, at=time.time())
        if len(self._beats) > BEATS:
            del self._beats[next(iter(self._beats))]

    async def _consumers(self, stream: str) -> AsyncIterator[dict[str, Any]]:
        offset = 0
        while True:
            page = await self._bus.connection.api(f"CONSUMER.LIST.{stream}", {"offset": offset})
            found = page.get("consumers") or []
            for one in found:
                yield one
            offset += len(found)
            if not found or offset >= int(page["total"]):
                return

    async def _oldest(self, kind: str, info: dict[str, Any]) -> float | None:
        """Return when the oldest message was stored that a consumer has not finished."""
        if not info["num_pending"] and not info["num_ack_pending"]:
            return None
        config = info["config"]
        done = info["delivered"] if config["ack_policy"] == "none" else info["ack_floor"]
        filters = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
        found = []
        for subject in filters:
            answer = await reads.direct(
                self._bus.connection,
                self._bus.names.stream(kind),
                {"seq": int(done["stream_seq"]) + 1, "next_by_subj": subject},
                f"oldest message of consumer {info['name']}",
            )
            if answer is not None:
                found.append(reads.stored_of(self._bus.names, answer).at)
        return min(found, default=None)

    async def _clients(self) -> tuple[ClientSample, ...] | None:
        """Return the other connections of this run, None when the server does not tell (it is asked
        again later).
        """
        if anyio.current_time() < self._silent_until:
            return None
        try:
            answers = await self._gather(_CONNECTIONS, msgspec.json.encode({"limit": _CONNECTIONS_LIMIT}))
        except (nats.errors.Error, OSError):
            return None  # the server has just gone away
        if not answers:
            self._silent_until = anyio.current_time() + _PAUSE_SECONDS
            return None
        found = (one for answer in answers for one in client_samples(self._bus.run, answer))
        return tuple(one for one in found if one.instance != self._bus.instance)

    async def _gather(self, subject: str, body: bytes) -> list[dict[str, Any]]:
        """Return the answers of all servers: of the one there is, or of those that answer in time."""
        connection = self._bus.connection
        inbox = f"{connection.inbox}.gather.{time.monotonic_ns():x}"
        arrivals: Mailbox[Msg] = Mailbox(limit=64)
        await connection.wait_connected("connection to ask for clients")
        subscription = await connection.subscribe(inbox, arrivals.put)
        several = bool(connection.client._server_info.get("cluster"))
        answers: list[dict[str, Any]] = []
        try:
            await connection.send(subject, body, reply=inbox)
            while True:
                with anyio.move_on_after(_NEXT_SECONDS if answers else _FIRST_SECONDS) as scope:
                    message = await anext(arrivals)
                if scope.cancelled_caught or status_of(message):
                    return answers
                answers.append(msgspec.json.decode(message.data))
                if not several:
                    return answers
        finally:
            with anyio.CancelScope(shield=True):
                await connection.unsubscribe(subscription)


@asynccontextmanager
async def probing(bus: NatsBus) -> AsyncIterator[Probe]:
    """Listen to heartbeats beside a probe."""
    probe = Probe(bus)
    async with bus.listen("hb.>") as beats, anyio.create_task_group() as tasks:

        async def hear() -> None:
            async for beat in beats:
                if isinstance(beat, Heartbeat):
                    probe.note(beat)

        tasks.start_soon(hear)
        yield probe
        tasks.cancel_scope.cancel()


def present_figures(present: Present) -> PresentFigures:
    """Return what is shown of one that is there; its start is by its own clock, the rest by the server's."""
    hello = present.hello
    return PresentFigures(
        role=hello.role,
        instance=hello.instance,
        state=hello.state,
        slots=hello.slots,
        version=hello.version if hello.version >= 0 else None,
        capabilities=hello.capabilities,
        host=hello.host,
        up_s=max(0.0, present.seen + present.age - hello.since / 1e9) if hello.since > 0 else None,
        age_s=present.age,
    )


def stream_sample(kind: str, info: dict[str, Any]) -> StreamSample:
    """Return a sample of a ``STREAM.INFO`` answer."""
    state, config = info["state"], info["config"]
    return StreamSample(
        stream=kind,
        messages=state["messages"],
        bytes=state["bytes"],
        first=state["first_seq"],
        last=state["last_seq"],
        limit_bytes=max(config.get("max_bytes", 0), 0),
        limit_messages=max(config.get("max_msgs", 0), 0),
        first_at=moment(state.get("first_ts")) if state["messages"] else None,
        last_at=moment(state.get("last_ts")),
    )


def consumer_sample(run: str, kind: str, info: dict[str, Any], oldest_at: float | None) -> ConsumerSample:
    """Return a sample of one entry of a ``CONSUMER.LIST`` answer of ``run``."""
    reader, prefix = str(info["config"].get("description") or ""), f"spade.{run}."
    return ConsumerSample(
        stream=kind,
        consumer=info["name"],
        client=reader.removeprefix(prefix).replace(".", "/", 1) if reader.startswith(prefix) else "",
        kind="reader" if info["config"]["ack_policy"] == "none" else "queue",
        pending=info["num_pending"],
        ack_pending=info["num_ack_pending"],
        redelivered=info["num_redelivered"],
        waiting=info["num_waiting"],
        delivered=info["delivered"]["consumer_seq"],
        oldest_at=oldest_at,
    )


def client_samples(run: str, answer: dict[str, Any]) -> Iterator[ClientSample]:
    """Yield the connections of ``run`` in a ``CONNZ`` answer; they are told by their names."""
    data = answer.get("data") or {}
    server, prefix = str(data.get("server_id", "")), f"spade.{run}."
    for one in data.get("connections") or ():
        name = str(one.get("name", ""))
        if not name.startswith(prefix):
            continue
        role, _, instance = name.removeprefix(prefix).partition(".")
        yield ClientSample(
            id=f"{server}:{one['cid']}",
            role=role,
            instance=instance,
            rtt_ms=milliseconds(one.get("rtt")),
            active_at=moment(one.get("last_activity")),
            pending_bytes=one.get("pending_bytes", 0),
            in_messages=one.get("in_msgs", 0),
            out_messages=one.get("out_msgs", 0),
            in_bytes=one.get("in_bytes", 0),
            out_bytes=one.get("out_bytes", 0),
        )


def moment(text: str | None) -> float | None:
    """Return the seconds since the epoch of a server's time, None for its zero."""
    if not text or text.startswith("0001-"):
        return None
    return datetime.fromisoformat(text).timestamp()


def milliseconds(text: str | None) -> float | None:
    """Return a duration as the server writes it (``273µs``, ``1m2.5s``) in milliseconds."""
    parts = _DURATION.findall(text or "")
    return sum(float(value) * _MILLISECONDS[unit] for value, unit in parts) if parts else None
