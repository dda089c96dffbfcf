"""The repaired client of nats-py, what it needs to know of nats-py from inside, and the queue behind it."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from pathlib import Path

import anyio
import nats.errors
import pytest
from bus_worlds import TOKEN, take
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from scenes.brokers import broker

from bus.access import ADMIN
from bus.concurrency import ArrivalQueue, flat_task_group
from bus.connection import open_connection
from bus.nats_client import Arrival, NatsClient, headers_block, read_headers


def test_nats_py_is_the_version_that_is_repaired() -> None:
    """A newer one may do: read ``_flusher``, ``_send_publish``, ``_read_loop`` and ``Parser.parse`` first."""
    assert importlib.metadata.version("nats-py").startswith("2.16.")


def test_nats_py_is_inside_as_the_repairs_expect() -> None:
    client = Client()
    assert (client._pending, client._pending_data_size, client._flush_queue, client._sid) == ([], 0, None, 0)
    assert (client._reconnection_task, client._transport) == (None, None)
    flusher, reader = inspect.getsource(Client._flusher), inspect.getsource(Client._read_loop)
    assert "self._transport.writelines(self._pending[:])" in flusher
    assert "if not future.done():" in flusher
    assert "await self._ps.parse(b)" in reader
    names = ["self", "sid", "subject", "reply", "data", "headers"]
    assert list(inspect.signature(Client._process_msg).parameters) == names
    assert "self._attempt_reconnect()" in inspect.getsource(Client._process_op_err)
    assert "await self._connect_to_server(s)" in inspect.getsource(Client._select_next_server)
    assert "await self._process_connect_init()" in inspect.getsource(Client._attempt_reconnect)
    assert "self._sid += 1" in inspect.getsource(Client.subscribe)
    assert "self._id = id" in inspect.getsource(Subscription.__init__)


async def test_a_handler_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    client, heard = NatsClient(), list[Arrival]()

    def handle(arrival: Arrival) -> None:
        heard.append(arrival)
        raise RuntimeError("no use for this")

    client._handlers[1] = handle
    await client._ps.parse(
        b"MSG a 1 1\r\nx\r\nHMSG b.\x0b\xff 1 to.\x0c 12 13\r\nNATS/1.0\r\n\r\ny\r\nMSG c 7 1\r\nz"
    )
    await client._ps.parse(b"\r\n")
    assert [(one.subject, one.reply, one.data) for one in heard] == [
        ("a", "", b"x"),
        ("b.\x0b\ufffd", "to.\x0c", b"y"),
    ]
    assert "a message on a could not be handled" in caplog.text


@pytest.mark.parametrize("line", [b"MSG a\r\n", b"HMSG a b c\r\n", b"MSG a 1 x\r\n", b"WHAT\r\n"])
async def test_nonsense_is_a_protocol_error(line: bytes) -> None:
    with pytest.raises(nats.errors.ProtocolError):
        await NatsClient()._ps.parse(line)


def test_headers_are_read_whoever_wrote_them() -> None:
    assert read_headers(b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Stream: 7\r\n\r\n") == {
        "Status": "100",
        "Description": "Idle Heartbeat",
        "Nats-Last-Stream": "7",
    }
    assert read_headers(b"NATS/1.0 503\r\n\r\n") == {"Status": "503", "Description": ""}
    assert read_headers(b"NATS/1.0\r\nA:b\r\n\r\n") == {"A": "b"}
    assert read_headers(b"NATS/1.0 \xff\xfe\r\n\xff: \xfe\r\n") == {
        "Status": "\ufffd\ufffd",
        "Description": "",
        "\ufffd": "\ufffd",
    }
    assert read_headers(b"x") == {"Status": "x", "Description": ""}


def test_a_line_break_in_a_header_cannot_begin_another_line() -> None:
    block = headers_block({"Nats-Msg-Id": "a\r\nNats-TTL: 1"})
    assert read_headers(block) == {"Nats-Msg-Id": "a Nats-TTL: 1"}


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b 0", "a\tb"])
async def test_a_subject_cannot_smuggle_commands(subject: str, nats_url: str) -> None:
    async with open_connection(nats_url, name="client", token=TOKEN) as connection:
        with pytest.raises(nats.errors.BadSubjectError):
            connection.write(subject, b"")


async def test_messages_of_all_sizes_arrive_in_order_after_a_reconnect_too(nats_url: str) -> None:
    async with open_connection(nats_url, name="client", token=TOKEN) as connection:
        heard: list[tuple[str, int, dict[str, str]]] = []
        await connection.subscribe(
            "sizes.>", lambda arrival: heard.append((arrival.subject, len(arrival.data), arrival.headers))
        )
        for _ in range(2):
            expected = []
            for number, size in enumerate((0, 1000, 40_000, 4 << 20, 2)):
                head = headers_block({"Number": str(number)}) if number % 2 else b""
                assert connection.write(f"sizes.{number}", bytes(size), "", head)
                expected.append((f"sizes.{number}", size, {"Number": str(number)} if head else {}))
            await connection.barrier()
            assert heard == expected
            heard.clear()
            await connection.client.force_reconnect()
            with anyio.fail_after(10):
                await connection.wait_connected("reconnect")


async def test_large_messages_pass_tls_without_a_complaint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "asyncio")
    with broker(tmp_path, "tls", tls=True) as running:
        async with open_connection(running.url, name="client", role=ADMIN, **running.login()) as connection:
            heard: list[int] = []
            await connection.subscribe("spade.tls.x", lambda arrival: heard.append(len(arrival.data)))
            assert connection.write("spade.tls.x", bytes(4 << 20))
            await connection.barrier()
            assert heard == [4 << 20]
    assert not [record for record in caplog.records if record.name == "asyncio"]


# The queue between callbacks and readers.


async def test_items_come_in_order_and_then_the_end() -> None:
    for end, expected in ((None, StopAsyncIteration), (ValueError("over"), ValueError)):
        queue: ArrivalQueue[int] = ArrivalQueue()
        for number in range(200):
            queue.put(number)
        queue.end(end)
        queue.put(7)
        assert await take(queue, 200) == list(range(200))
        with pytest.raises(expected):
            await anext(queue)


async def test_a_bounded_queue_drops_the_oldest() -> None:
    queue: ArrivalQueue[int] = ArrivalQueue(limit=3)
    for number in range(5):
        queue.put(number)
    assert (queue.dropped, await take(queue, 3)) == (2, [2, 3, 4])


async def test_a_cancelled_reader_loses_nothing_and_many_readers_share() -> None:
    queue: ArrivalQueue[int] = ArrivalQueue()
    with anyio.move_on_after(0.01):
        await anext(queue)
    got: list[int] = []

    async def read() -> None:
        got.append(await anext(queue))

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(read)
        await anyio.sleep(0.01)
        for number in range(5):
            queue.put(number)
    assert sorted(got) == list(range(5))


async def test_one_failure_arrives_as_itself_and_two_as_a_group() -> None:
    async def fail(kind: type[Exception]) -> None:
        raise kind

    async def run(*kinds: type[Exception]) -> None:
        async with flat_task_group() as group:
            for kind in kinds:
                group.start_soon(fail, kind)

    with pytest.raises(KeyError):
        await run(KeyError)
    with pytest.raises(ExceptionGroup):
        await run(KeyError, ValueError)
