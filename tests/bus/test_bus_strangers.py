"""Foreign messages, written with a bare socket, stop no reader; and corners of publishing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import psutil
import pytest
from bus_examples import summary, ticket
from bus_trouble import RUN, delay_restarts, drop_once, kill, rejected, served, until
from bus_worlds import TOKEN, nats_world, take
from scenes.brokers import broker

from bus import Bus, BusError, Limits, connect
from bus.connection import status_of
from bus.messages import DeadLetter, Message
from bus.nats_client import Arrival

IN_PROCESS = b'{"error":{"code":409,"err_code":10158,"description":"duplicate message id is in process"}}'


async def say(url: str, subject: bytes, payload: bytes, head: bytes = b"") -> None:
    """Publish bytes as they are."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    login = {"auth_token": TOKEN, "verbose": False, "pedantic": False, "headers": True, "protocol": 1}
    writer.write(b"CONNECT " + json.dumps(login).encode() + b"\r\n")
    if head:
        sizes = b" %d %d\r\n" % (len(head), len(head) + len(payload))
        writer.write(b"HPUB " + subject + sizes + head + payload + b"\r\nPING\r\n")
    else:
        writer.write(b"PUB " + subject + b" %d\r\n" % len(payload) + payload + b"\r\nPING\r\n")
    while (line := await reader.readline()) != b"PONG\r\n":
        assert line.startswith((b"INFO", b"+OK")), line
    writer.close()
    await writer.wait_closed()


STRANGE: dict[str, tuple[bytes, bytes, bytes]] = {
    "a subject with another kind of space": ("x.a\u00a0b".encode(), b"no frame", b""),
    "a subject with the end of a line of its own": ("x.a\u2028b.\u0085".encode(), b"no frame", b""),
    "a subject that is no text": (b"x.\xff\xfe", b"no frame", b""),
    "no payload": (b"x.empty", b"", b""),
    "the look of an absent consumer": (b"x.status", b"", b"NATS/1.0 503 No Responders\r\n\r\n"),
    "the look of an end": (b"x.status", b"", b"NATS/1.0 404 No Messages\r\nNats-Pending-Messages: 9\r\n\r\n"),
    "the look of a heartbeat": (b"x.status", b"", b"NATS/1.0 100 Idle Heartbeat\r\n\r\n"),
    "the look of a deleted consumer": (b"x.status", b"", b"NATS/1.0 409 Consumer Deleted\r\n\r\n"),
    "a status that is no text": (b"x.status", b"", b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
    "a place of its own": (b"x.place", b"", b"NATS/1.0\r\nNats-Sequence: x\r\n\r\n"),
}


@pytest.mark.parametrize("what", STRANGE)
async def test_readers_pass_what_strangers_leave(nats_url: str, what: str) -> None:
    tail, payload, head = STRANGE[what]
    async with nats_world(nats_url) as w:
        bus = w.bus
        async with bus.follow("EVENT") as records:
            await bus.publish(summary(1))
            await say(nats_url, f"{bus.names.root}event.".encode() + tail, payload, head)
            await bus.publish(summary(2))
            assert [record.message for record in await take(records, 2, 5)] == [summary(1), summary(2)]
            assert bus.statistics()["follow_event_restarts"] == 0
        async with bus.follow("EVENT") as records:
            assert [record.sequence for record in await take(records, 2, 5)] == [1, 3]
        async with bus.follow("DLQ") as letters:
            (record,) = await take(letters, 1, 5)
            assert isinstance(record.message, DeadLetter)
            assert record.message.sequence == 2
        assert [record.sequence async for record in bus.replay("EVENT")] == [1, 3]
        await say(nats_url, f"{bus.names.root}task.designer.".encode() + tail, payload, head)
        await bus.publish(ticket(2))
        async with bus.consume("designer", limit=1) as source:
            (delivery,) = await take(source, 1, 5)
            assert delivery.message == ticket(2)
            await delivery.ack()
        assert (await bus.stream_info("TASK")).messages == 0
        assert (await bus.stream_info("DLQ")).messages == 2
        assert bus.connection.counts["revived"] == 0


def test_a_stored_message_is_no_control_message() -> None:
    control = Arrival("i", "", b"", b"NATS/1.0 404 Message Not Found\r\n\r\n")
    stored = Arrival("i", "", b"", b"NATS/1.0 404\r\nNats-Stream: E\r\nNats-Sequence: 7\r\n\r\n")
    assert (status_of(control), status_of(stored)) == ("404", "")


# Publishing.


async def test_a_source_that_fails_leaves_nothing_on_its_way(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages before a failure are stored when ``publish_all`` raises, even a lost one."""

    def messages() -> Iterator[Message]:
        yield summary(1)
        yield summary(2)
        raise ValueError("no third one")

    async with nats_world(nats_url) as w:
        bus = w.bus
        bus.publisher.limits = Limits(ack_seconds=0.2)
        lost = drop_once(monkeypatch, bus)
        with pytest.raises(ValueError, match="no third one"):
            await bus.publish_all(messages())
        assert len(lost) == 1
        assert bus.statistics()["publish_in_flight"] == 0
        assert (await bus.stream_info("EVENT")).messages == 2


NO_LEADER = b'{"error":{"code":503,"err_code":10008,"description":"JetStream system unavailable"}}'


def refuse(monkeypatch: pytest.MonkeyPatch, bus: Bus, answer: Arrival, times: int) -> list[str]:
    """Answer the next messages for EVENT in the server's place; return their subjects."""
    real, refused = bus.connection.ask, list[str]()

    async def ask(subject: str, *rest: Any, **given: Any) -> Arrival | None:
        if len(refused) < times and ".event." in subject:
            refused.append(subject)
            return answer
        return await real(subject, *rest, **given)

    monkeypatch.setattr(bus.connection, "ask", ask)
    return refused


@pytest.mark.parametrize("absent_seconds", [0.05, 10.0])
@pytest.mark.parametrize("answer", [IN_PROCESS, NO_LEADER, b""])
async def test_a_stream_of_a_cluster_may_be_unready_for_a_while(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, answer: bytes, absent_seconds: float
) -> None:
    """A message on its way into the copies, no leader, no answer: the stream exists and comes back."""
    async with nats_world(nats_url) as w:
        w.bus.publisher.limits = Limits(absent_seconds=absent_seconds)
        monkeypatch.setattr("bus.publisher.random.uniform", lambda low, high: 0.04)
        head = b"" if answer else b"NATS/1.0 503\r\n\r\n"
        refused = refuse(monkeypatch, w.bus, Arrival("i", "", answer, head), 4)
        assert await w.bus.publish(summary(1)) == 1
        assert len(refused) == 4


async def test_a_server_that_takes_less_than_before_refuses_one_message(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that was accepted for the window ends alone when it became too large on the way."""
    async with nats_world(nats_url) as w:
        bus = w.bus
        drop_once(monkeypatch, bus)
        refused: list[BusError] = []

        async def publish() -> None:
            try:
                await bus.publish(rejected(1, 5000))
            except BusError as error:
                refused.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(publish)
            await until(lambda: bus.statistics()["publish_in_flight"] == 1, "the message")
            bus.connection.client._max_payload = 1000
            bus.connection._changed()
        assert "exceeds the 1000 bytes that the server takes" in str(refused)
        assert await bus.publish(summary(1)) == 1


# The connection.


@pytest.mark.parametrize("tls", [False, True])
async def test_a_refused_client_leaves_no_socket(tmp_path: Path, tls: bool) -> None:
    with broker(tmp_path, RUN, tls=tls) as running:
        port = running.port
        for _ in range(3):
            with pytest.raises(BusError, match="refused the token"):
                async with connect(
                    running.url, run=RUN, role="x", instance="1", token="guess", tls=running.ca
                ):
                    pass
            mine = psutil.Process().net_connections()
            assert not [one for one in mine if one.raddr and one.raddr.port == port]


async def test_a_server_that_lived_long_is_started_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one that dies again and again is kept waiting."""
    delay_restarts(monkeypatch, 60.0)
    monkeypatch.setattr("bus.server._YOUNG_SECONDS", 0.0)
    async with served(tmp_path) as (handle, bus):
        for number in range(4):
            with anyio.fail_after(10):
                await kill(handle)
                await bus.publish(summary(number))
