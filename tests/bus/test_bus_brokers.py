"""Brokers of others: other acknowledgement subjects, small limits, no JetStream, credentials in the URL."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import pytest
from bus_examples import example, summary, ticket
from bus_worlds import TOKEN, nats_world, take
from scenes.brokers import JETSTREAM, USUAL, plain_server

from bus import BusError, connect, provision, serve
from bus.connection import open_connection, public_url, split_url
from bus.messages import DesignRejected
from bus.nats_client import Arrival
from bus.pull import Delivered, parse_reply

RUN = "foreign"
ACCOUNT = "accounts { A: { users: [ { user: a, password: p } ] } }\nno_auth_user: a\n"


# Acknowledgement subjects.


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.TASK_r.agent.3.17.21.1700000000000000000.5",
        "$JS.ACK._.hash.TASK_r.agent.3.17.21.1700000000000000000.5",
        "$JS.ACK.hub.hash.TASK_r.agent.3.17.21.1700000000000000000.5.token",
        "$JS.ACK.hub.hash.TASK_r.agent.3.17.21.1700000000000000000.5.token.and.more",
    ],
)
def test_both_forms_of_delivery_data_are_read(reply: str) -> None:
    assert parse_reply(reply) == Delivered(3, 17, 21)


UNREADABLE = [
    "$JS.ACK.TASK_r.agent.3.17.21.1700000000000000000",
    "$JS.ACK.hub.TASK_r.agent.3.17.21.1700000000000000000.5",
    "$JS.ACK.TASK_r.agent.a.b.c.d.e",
    "$JS.ACK3.TASK_r.agent.3.17.21.1700000000000000000.5",
]


@pytest.mark.parametrize("reply", UNREADABLE)
def test_delivery_data_that_cannot_be_read_is_an_error(reply: str) -> None:
    with pytest.raises(BusError, match=r"acknowledgement subject cannot be read: '\$JS"):
        parse_reply(reply)


@pytest.mark.parametrize("reply", UNREADABLE)
@pytest.mark.parametrize("reader", ["worker", "follower"])
async def test_a_reader_of_unreadable_delivery_data_ends_with_an_error(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, reader: str, reply: str
) -> None:
    async with nats_world(nats_url) as w:
        bus = w.bus
        await bus.publish_all([summary(1), ticket(1)])
        real = bus.connection.subscribe

        async def subscribe(subject: str, handler: Any) -> Any:
            def receive(message: Arrival) -> None:
                delivered = message.reply.startswith("$JS.ACK.")
                handler(Arrival(message.subject, reply, message.data, message.head) if delivered else message)

            return await real(subject, receive)

        monkeypatch.setattr(bus.connection, "subscribe", subscribe)

        async def read() -> None:
            if reader == "worker":
                async with bus.consume("designer", limit=1) as work:
                    await anext(work)
            else:
                async with bus.follow("EVENT") as records:
                    await anext(records)

        with anyio.fail_after(10), pytest.raises(BusError, match="cannot be read"):
            await read()


async def test_a_server_with_the_second_form_hands_out_work_and_facts(tmp_path: Path) -> None:
    with plain_server(tmp_path, f"{USUAL}feature_flags {{ js_ack_fc_v2: true }}\n") as url:
        await provision(url, run=RUN, store_gb=0.25)
        async with connect(url, run=RUN, role="x", instance="1") as bus:
            await bus.publish_all([*map(ticket, range(3)), summary(1)])
            async with bus.consume("designer", limit=1) as work:
                for number in range(3):
                    (delivery,) = await take(work, 1)
                    assert delivery.message == ticket(number)
                    await delivery.ack()
            assert (await bus.stream_info("TASK")).messages == 0
            async with bus.follow("EVENT") as records:
                assert (await take(records, 1))[0].message == summary(1)


# Limits.


async def test_named_bytes_travel_through_a_broker_with_the_usual_limit(tmp_path: Path) -> None:
    with plain_server(tmp_path, JETSTREAM) as url:
        await provision(url, run=RUN, store_gb=1.0)
        async with connect(url, run=RUN, role="learner", instance="1") as bus:
            content = bytes(range(256)) * 12_000
            await bus.blobs.put("weights", content)
            assert await bus.blobs.get("weights") == content
            await bus.blobs.save("weights", tmp_path / "saved")
            assert (tmp_path / "saved").read_bytes() == content


@pytest.mark.parametrize(
    ("announced", "wanted"), [("", 8), ("max_payload: 2MB\n", 8), ("max_payload: 7MB\n", 64)]
)
async def test_a_broker_with_too_small_a_limit_is_refused_at_the_start(
    tmp_path: Path, announced: str, wanted: int
) -> None:
    with plain_server(tmp_path, announced + JETSTREAM) as url:
        with (
            anyio.fail_after(10),
            pytest.raises(BusError, match=rf"may send {wanted} MB \(bus\.max_payload_mb"),
        ):
            await provision(url, run=RUN, store_gb=0.25, max_payload_mb=wanted)
        await provision(url, run=RUN, store_gb=0.25, max_payload_mb=1)


@pytest.mark.parametrize("megabytes", [1, 2, 8])
async def test_a_message_travels_whole_up_to_the_announced_limit(tmp_path: Path, megabytes: int) -> None:
    async with serve(tmp_path, run=RUN, max_payload_mb=megabytes, store_gb=0.5) as server:
        await provision(server.url, run=RUN, token=server.token, store_gb=0.5, max_payload_mb=megabytes)
        async with connect(server.url, run=RUN, role="x", instance="1", token=server.token) as bus:
            just = example(DesignRejected, source="x" * ((megabytes << 20) - 2000))
            assert await bus.publish(just) == 1
            assert await bus.get("EVENT", 1) == just
            over = example(DesignRejected, design="over", source="x" * (megabytes << 20))
            with pytest.raises(BusError, match=r"exceeds .*agent\.play_tokens.*bus\.max_payload_mb"):
                await bus.publish(over)
            assert (await bus.stream_info("EVENT")).messages == 1


# JetStream.


@pytest.mark.parametrize(
    "config", ["", ACCOUNT, JETSTREAM + ACCOUNT], ids=["off", "off with accounts", "off for the account"]
)
async def test_a_broker_without_jetstream_is_named_at_once(tmp_path: Path, config: str) -> None:
    with (
        plain_server(tmp_path, config) as url,
        anyio.fail_after(15),
        pytest.raises(BusError, match=r"has no JetStream.*-js"),
    ):
        await provision(url, run=RUN, store_gb=0.25)


# Credentials in the URL.


@pytest.mark.parametrize("password", ["p@ss", "a:b/c?d#e", "100%", "ä ö"])
async def test_credentials_in_the_url_are_percent_decoded_and_never_printed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, password: str
) -> None:
    quoted = json.dumps(password, ensure_ascii=False)
    users = f"authorization {{ users: [ {{ user: spade, password: {quoted} }} ] }}\n"
    caplog.set_level(logging.DEBUG, "spade.bus")
    with plain_server(tmp_path, JETSTREAM + users) as url:
        right = url.replace("//", f"//spade:{quote(password, safe='')}@")
        await provision(right, run=RUN, store_gb=0.25)
        async with connect(right, run=RUN, role="x", instance="1") as bus:
            assert await bus.publish(summary(1)) == 1
        wrong = url.replace("//", "//spade:not-the-secret@")
        with (
            anyio.fail_after(10),
            pytest.raises(BusError, match="refused the credentials") as caught,
        ):
            async with open_connection(wrong, name="t"):
                pass
        assert "not-the-secret" not in f"{caught.value}{caplog.text}"
        assert password not in caplog.text
    with anyio.fail_after(15), pytest.raises(BusError) as caught:
        async with open_connection(right, name="t", connect_seconds=0.3):
            pass
    assert quote(password, safe="") not in str(caught.value)
    assert password not in str(caught.value)


def test_credentials_are_split_from_the_url() -> None:
    assert split_url("nats://a:4222") == (["nats://a:4222"], {})
    assert split_url("tls://u:p%40q@a:1, tls://b:2") == (
        ["tls://a:1", "tls://b:2"],
        {"user": "u", "password": "p@q"},
    )
    assert split_url("nats://tok%2Fen@[::1]:4222") == (["nats://[::1]:4222"], {"token": "tok/en"})
    assert split_url("host:4222") == (["host:4222"], {})
    assert public_url("nats://u:p@a,nats://v:q@b") == "nats://a,nats://b"


async def test_a_token_in_the_url_is_one(nats_url: str) -> None:
    async with open_connection(nats_url.replace("//", f"//{quote(TOKEN)}@"), name="t") as connection:
        assert TOKEN not in connection.url
        assert quote(TOKEN) not in connection.url
