"""The fast lane against nats-py's own parser, and what it needs to know of nats-py from inside."""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import nats.errors
import pytest
from brokers import broker
from bus_worlds import TOKEN
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from bus.access import ADMIN
from bus.connection import Connection, open_connection
from bus.lane import Arrival, Lane, headers_block, read_headers


def test_nats_py_is_the_version_that_the_lane_knows() -> None:
    """A newer one may do: read ``_flusher``, ``_send_publish``, ``_read_loop`` and ``Parser.parse`` first."""
    assert importlib.metadata.version("nats-py").startswith("2.16.")


def test_nats_py_is_inside_as_the_lane_expects() -> None:
    client = Client()
    assert isinstance(client._ps, Parser)
    assert client._ps.state == AWAITING_CONTROL_LINE
    assert isinstance(client._ps.buf, bytearray)
    assert client._pending == []
    assert client._pending_data_size == 0
    assert client._flush_queue is None
    assert client._sid == 0
    assert {"in_msgs", "in_bytes", "out_msgs", "out_bytes"} <= set(client.stats)
    flusher, reader = inspect.getsource(Client._flusher), inspect.getsource(Client._read_loop)
    assert "self._transport.writelines(self._pending[:])" in flusher
    assert "if not future.done():" in flusher
    assert "await self._ps.parse(b)" in reader
    assert list(inspect.signature(Client._process_msg).parameters) == [
        "self",
        "sid",
        "subject",
        "reply",
        "data",
        "headers",
    ]
    assert "if not self._transport:" in inspect.getsource(Client._connect_to_server)
    assert "self._id = id" in inspect.getsource(Subscription.__init__)


class _Recorder:
    """A client as far as the parser sees one; notes what comes nats-py's way."""

    def __init__(self) -> None:
        self.stats = {"in_msgs": 0, "in_bytes": 0, "out_msgs": 0, "out_bytes": 0}
        self.passed: list[tuple[Any, ...]] = []
        self.handed: list[tuple[Any, ...]] = []
        self._ps: Any = None

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, head: Any) -> None:
        self.passed.append((sid, subject.decode(), reply.decode(), bytes(data), bytes(head or b"")))

    async def _process_ping(self) -> None:
        self.passed.append(("ping",))

    async def _process_pong(self) -> None:
        self.passed.append(("pong",))

    async def _process_err(self, text: str) -> None:
        self.passed.append(("err", text))

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.passed.append(("info", info))


_words = st.text("abc.-_$019", min_size=1, max_size=12)
_payloads = st.one_of(
    st.binary(max_size=40), st.just(b"MSG a 1 3\r\nPING\r\n"), st.binary(min_size=5000, max_size=5001)
)


def _message(subject: str, number: int, reply: str, payload: bytes, headers: dict[str, str]) -> bytes:
    head = headers_block(headers) if headers else b""
    words = [subject, str(number), *([reply] if reply else [])]
    if head:
        return (
            f"HMSG {' '.join(words)} {len(head)} {len(head) + len(payload)}\r\n".encode()
            + head
            + payload
            + b"\r\n"
        )
    return f"MSG {' '.join(words)} {len(payload)}\r\n".encode() + payload + b"\r\n"


_messages = st.builds(
    _message,
    _words,
    st.integers(1, 3),
    st.one_of(st.just(""), _words),
    _payloads,
    st.dictionaries(
        st.text("abAB-", min_size=1, max_size=5), st.text("xyz :", max_size=8).map(str.strip), max_size=2
    ),
)
_controls = st.sampled_from(
    [b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'Slow Consumer'\r\n", b'INFO {"version":"2.15.1"}\r\n']
)


def _cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:stop] for start, stop in itertools.pairwise(edges)]


@given(st.lists(st.one_of(_messages, _controls), max_size=8), st.lists(st.integers(0, 1 << 20), max_size=6))
async def test_it_reads_what_nats_py_reads_however_the_bytes_are_cut(
    parts: list[bytes], places: list[int]
) -> None:
    plain, ours = _Recorder(), _Recorder()
    parser = Parser(plain)
    lane = Lane(ours)
    order: list[tuple[Any, ...]] = ours.passed
    for number in (1, 2):
        lane.handlers[str(number)] = lambda arrival, number=number: order.append(
            (number, arrival.subject, arrival.reply, arrival.data, arrival.head)
        )
    for piece in _cut(b"".join(parts), places):
        await parser.parse(piece)
        await ours._ps.parse(piece)
    assert ours.passed == plain.passed
    assert not ours._ps.buf
    mine = [entry for entry in ours.passed if entry[0] in (1, 2)]
    assert ours.stats["in_msgs"] == len(mine)


@pytest.mark.parametrize(
    "line", [b"MSG a\r\n", b"HMSG a b c\r\n", b"MSG a 1 x\r\n", b"WHAT\r\n", b"x" * 1_100_000]
)
async def test_nonsense_is_a_protocol_error(line: bytes) -> None:
    recorder = _Recorder()
    Lane(recorder)
    with pytest.raises(nats.errors.ProtocolError):
        await recorder._ps.parse(line)


async def test_a_server_of_a_large_cluster_names_all_members() -> None:
    recorder = _Recorder()
    Lane(recorder)
    members = [f"member-{number}.example:4222" for number in range(400)]
    line = b"INFO " + msgspec.json.encode({"connect_urls": members}) + b"\r\n"
    for start in range(0, len(line), 3000):
        await recorder._ps.parse(line[start : start + 3000])
    assert recorder.passed == [("info", {"connect_urls": members})]


async def test_a_reset_forgets_a_half_message() -> None:
    recorder = _Recorder()
    lane, heard = Lane(recorder), list[Arrival]()
    lane.handlers["1"] = heard.append
    await recorder._ps.parse(b"MSG a 1 10\r\nhalf")
    recorder._ps.reset()
    await recorder._ps.parse(b"MSG b 1 2\r\nok\r\n")
    assert [(arrival.subject, arrival.data) for arrival in heard] == [("b", b"ok")]


async def test_a_handler_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    recorder = _Recorder()
    lane, heard = Lane(recorder), list[bytes]()

    def handle(arrival: Arrival) -> None:
        heard.append(arrival.data)
        raise RuntimeError("no use for this")

    lane.handlers["1"] = handle
    await recorder._ps.parse(b"MSG a 1 1\r\nx\r\nMSG a 1 1\r\ny\r\n")
    assert heard == [b"x", b"y"]
    assert "a message on a could not be handled" in caplog.text


def test_control_messages_have_a_status_and_a_description() -> None:
    assert read_headers(b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Stream: 7\r\n\r\n") == {
        "Status": "100",
        "Description": "Idle Heartbeat",
        "Nats-Last-Stream": "7",
    }
    assert read_headers(b"NATS/1.0 503\r\n\r\n") == {"Status": "503"}
    assert read_headers(b"NATS/1.0\r\nA:b\r\n\r\n") == {"A": "b"}


def test_a_line_break_in_a_header_cannot_begin_another_line() -> None:
    block = headers_block({"Nats-Msg-Id": "a\r\nNats-TTL: 1"})
    assert read_headers(block) == {"Nats-Msg-Id": "a Nats-TTL: 1"}


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b 0", "a\tb"])
async def test_a_subject_cannot_smuggle_commands(subject: str, nats_url: str) -> None:
    async with open_connection(nats_url, name="lane", token=TOKEN) as connection:
        with pytest.raises(nats.errors.BadSubjectError):
            connection.write(subject, b"", "")


async def test_lines_of_one_turn_go_out_together_and_in_order(nats_url: str) -> None:
    async with open_connection(nats_url, name="lane", token=TOKEN) as connection:
        heard: list[tuple[str, bytes, dict[str, str] | None]] = []
        await connection.subscribe(
            "lane.>", lambda arrival: heard.append((arrival.subject, arrival.data, arrival.headers))
        )
        writes = _count_writes(connection)
        payloads = [b"x" * (size * 1000) for size in (0, 1, 40, 2)]
        for number, payload in enumerate(payloads):
            head = headers_block({"Number": str(number)}) if number % 2 else b""
            connection.write(f"lane.{number}", payload, "", head)
        assert await connection.barrier()
        assert heard == [
            (f"lane.{number}", payload, {"Number": str(number)} if number % 2 else None)
            for number, payload in enumerate(payloads)
        ]
        assert len(writes) == 1
        assert connection.client.stats["out_msgs"] == 4


def _count_writes(connection: Connection) -> list[int]:
    transport, writes = connection.client._transport, list[int]()
    original = transport.writelines

    def writelines(lines: list[bytes]) -> None:
        writes.append(len(lines))
        original(lines)

    transport.writelines = writelines
    return writes


async def test_large_messages_are_read_in_few_pieces_after_a_reconnect_too(nats_url: str) -> None:
    async with open_connection(nats_url, name="lane", token=TOKEN) as connection:
        heard: list[bytes] = []
        await connection.subscribe("lane", lambda arrival: heard.append(arrival.data))
        transport = connection.client._transport
        for times in (1, 2):
            connection.write("lane", bytes(4 << 20), "")
            assert await connection.barrier()
            assert heard == [bytes(4 << 20)] * times
            assert transport._io_reader._limit >= 256 << 10
            changed = anyio.Event()
            unwatch = connection.watch(changed.set)
            await connection.client.force_reconnect()
            with anyio.fail_after(5):
                await changed.wait()
                await connection.wait_connected("reconnect")
            unwatch()
            assert connection.client._transport is transport


async def test_large_messages_are_read_in_few_pieces_over_tls_and_nobody_complains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with broker(tmp_path, "lane", tls=True) as running:
        async with open_connection(running.url, name="lane", role=ADMIN, **running.login()) as connection:
            heard: list[int] = []
            await connection.subscribe("spade.lane.x", lambda arrival: heard.append(len(arrival.data)))
            connection.write("spade.lane.x", bytes(4 << 20), "")
            assert await connection.barrier()
            assert heard == [4 << 20]
            assert connection.client._transport._io_reader._limit >= 256 << 10
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_a_request_of_nats_py_works_beside_the_lane(nats_url: str) -> None:
    async with open_connection(nats_url, name="lane", token=TOKEN) as connection:
        await connection.subscribe(
            "ask", lambda question: connection.write(question.reply, b"yes", "") and None
        )
        answer = await connection.client.request("ask", b"?", timeout=5)
        assert answer.data == b"yes"
