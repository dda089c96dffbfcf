"""Reads in a cluster: the copy that answers may be behind the leader."""

from __future__ import annotations

import base64
import itertools
from typing import Any

import msgspec
import pytest
from bus_examples import summary

from bus import NotFound, codec, reads
from bus.nats_client import Arrival, headers_block
from bus.subjects import Names

NAMES = Names("r")


def stored(sequence: int) -> Arrival:
    message = summary(sequence)
    headers = {
        "Nats-Sequence": str(sequence),
        "Nats-Subject": NAMES.subject(message.tail),
        "Nats-Time-Stamp": "2026-01-01T00:00:00.123456789Z",
    }
    frame = codec.encode(message, run="r", role="scorer", instance="one")
    return Arrival("inbox", "", frame, headers_block(headers))


class Cluster:
    """Copies that answer in turn, each with two of what it has, and a leader that has everything."""

    def __init__(self, *copies: int, leader: int) -> None:
        self.copies, self.leader = itertools.cycle(copies), leader
        self.bare = False

    async def request(self, subject: str, payload: bytes, *, into: list[Arrival] | None, **_: Any) -> Arrival:
        assert subject == "$JS.API.DIRECT.GET.EVENT_r"
        wanted, known = msgspec.json.decode(payload)["seq"], next(self.copies)
        if wanted > known:
            return Arrival("inbox", "", b"", b"NATS/1.0 404 Message Not Found\r\n\r\n")
        if into is None:
            return stored(wanted)
        into += [stored(sequence) for sequence in range(wanted, min(wanted + 1, known) + 1)]
        return Arrival("inbox", "", b"", b"NATS/1.0 204 EOB\r\n\r\n")

    async def api(self, verb: str, body: dict[str, Any], *, seconds: float = 0) -> dict[str, Any]:
        assert verb == "STREAM.MSG.GET.EVENT_r"
        sequence = body.get("seq", self.leader)
        if sequence > self.leader:
            raise NotFound("no message")
        whole = stored(sequence)
        forged = b"NATS/1.0\r\nNats-Msg-Id: summary\r\nNats-Sequence: 999\r\n\r\n"
        hidden = {"hdrs": base64.b64encode(forged).decode(), "data": base64.b64encode(whole.data).decode()}
        if self.bare:
            del hidden["hdrs"]
        place = {"subject": whole.headers["Nats-Subject"], "time": whole.headers["Nats-Time-Stamp"]}
        return {"message": {"seq": sequence, **place, **hidden}}


async def replayed(cluster: Cluster, last: int) -> list[int]:
    found = reads.between(cluster, NAMES, "EVENT", start=1, last=last)  # type: ignore[arg-type]
    return [one.sequence async for one in found]


@pytest.mark.parametrize("copies", [(5,), (3, 5), (0, 0, 2, 5), (2, 2, 2, 4, 5)])
async def test_a_replay_reaches_the_last_message_whoever_answers(copies: tuple[int, ...]) -> None:
    assert await replayed(Cluster(*copies, leader=5), last=5) == [1, 2, 3, 4, 5]


async def test_what_came_after_the_call_is_not_waited_for() -> None:
    assert await replayed(Cluster(3, leader=9), last=3) == [1, 2, 3]


async def test_messages_that_are_gone_are_not_waited_for() -> None:
    assert await replayed(Cluster(3, leader=3), last=7) == [1, 2, 3]


LAST: dict[str, object] = {"last_by_subj": NAMES.subject(summary(1).tail)}


async def test_the_last_message_is_the_leaders() -> None:
    found = await reads.from_leader(Cluster(3, leader=5), "EVENT_r", LAST)  # type: ignore[arg-type]
    assert found is not None
    assert reads.stored_of(NAMES, found).sequence == 5  # not the 999 that its publisher wrote


async def test_a_message_that_a_copy_lacks_is_had_from_the_leader() -> None:
    found = await reads.get(Cluster(3, leader=5), NAMES, "EVENT", 4)  # type: ignore[arg-type]
    assert (found.sequence, found.message, found.tail) == (4, summary(4), summary(4).tail)
    with pytest.raises(NotFound, match="no message 6"):
        await reads.get(Cluster(3, leader=5), NAMES, "EVENT", 6)  # type: ignore[arg-type]


async def test_a_leaders_answer_without_headers_is_read_too() -> None:
    cluster = Cluster(3, leader=5)
    cluster.bare = True
    found = await reads.from_leader(cluster, "EVENT_r", {"seq": 2})  # type: ignore[arg-type]
    assert found is not None
    read = reads.stored_of(NAMES, found)
    assert read.id == ""
    assert reads.record_of(read).message == summary(2)
