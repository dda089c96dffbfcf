"""Reads in a cluster: the copy that answers may be behind the leader."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from bus_examples import summary
from nats.aio.msg import Msg

from bus import NotFound, codec, reads
from bus.subjects import Names

NAMES = Names("r")


def stored(sequence: int) -> Msg:
    message = summary(sequence)
    headers = {
        "Nats-Sequence": str(sequence),
        "Nats-Subject": NAMES.subject(message.tail),
        "Nats-Num-Pending": "0",
    }
    frame = codec.encode(message, run="r", role="scorer", instance="one")
    return Msg(_client=None, subject="inbox", data=frame, headers=headers)


def end(status: str) -> Msg:
    return Msg(_client=None, subject="inbox", data=b"", headers={"Status": status, "Nats-Num-Pending": "0"})


class Cluster:
    """Copies that answer in turn, each with what it has, and a leader that has everything."""

    inbox = "inbox"

    def __init__(self, *copies: int, leader: int, clustered: bool = True) -> None:
        self.copies, self.leader, self.clustered = list(copies), leader, clustered
        self.bare = False
        self._answer: Callable[[Msg], None] | None = None

    async def wait_connected(self, _: str) -> None: ...

    def watch(self, _: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    async def subscribe(self, _: str, handler: Callable[[Msg], None]) -> None:
        self._answer = handler

    async def unsubscribe(self, _: None) -> None:
        self._answer = None

    def write(self, _: str, payload: bytes, __: str) -> bool:
        wanted, held = msgspec.json.decode(payload)["seq"], self.copies.pop(0)
        assert self._answer is not None
        for sequence in range(wanted, held + 1):
            self._answer(stored(sequence))
        self._answer(end("204" if wanted <= held else "404"))
        return True

    async def request(self, subject: str, payload: bytes, *, awaited: str, seconds: float) -> Msg:
        assert subject == "$JS.API.DIRECT.GET.EVENT_r"
        wanted, held = msgspec.json.decode(payload).get("seq", self.copies[0]), self.copies.pop(0)
        return stored(wanted) if 0 < wanted <= held else end("404")

    async def api(self, verb: str, body: dict[str, Any], *, seconds: float = 0) -> dict[str, Any]:
        assert verb == "STREAM.MSG.GET.EVENT_r"
        body = {"seq": self.leader, **body}
        if body["seq"] > self.leader:
            raise NotFound("no message")
        whole, time = stored(body["seq"]), "2026-01-01T00:00:00.123456789Z"
        forged = b"NATS/1.0\r\nNats-Msg-Id: summary\r\nNats-Sequence: 999\r\n\r\n"
        hidden = {"hdrs": base64.b64encode(forged).decode(), "data": base64.b64encode(whole.data).decode()}
        if self.bare:
            del hidden["hdrs"]
        subject = (whole.headers or {})["Nats-Subject"]
        return {"message": {"seq": body["seq"], "subject": subject, "time": time, **hidden}}


async def replayed(cluster: Cluster, last: int) -> list[int]:
    found = reads.replay(cluster, NAMES, "EVENT", start=1, tails=[], last=last)  # type: ignore[arg-type]
    return [record.sequence async for record in found if not isinstance(record, Exception)]


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_PAUSE_SECONDS", 0.0)


@pytest.mark.parametrize("copies", [(5,), (3, 5), (0, 0, 2, 5), (2, 2, 2, 4, 5)])
async def test_a_replay_reaches_the_last_message_whoever_answers(copies: tuple[int, ...]) -> None:
    assert await replayed(Cluster(*copies, leader=5), last=5) == [1, 2, 3, 4, 5]


async def test_what_came_after_the_call_is_not_waited_for() -> None:
    assert await replayed(Cluster(3, leader=9), last=3) == [1, 2, 3]


async def test_messages_that_are_gone_are_not_waited_for() -> None:
    assert await replayed(Cluster(3, leader=3), last=7) == [1, 2, 3]


async def test_one_server_alone_is_never_behind() -> None:
    assert await replayed(Cluster(3, leader=5, clustered=False), last=5) == [1, 2, 3]


LAST: dict[str, object] = {"last_by_subj": NAMES.subject(summary(1).tail)}


async def test_the_last_message_is_the_leaders() -> None:
    cluster = Cluster(3, leader=5)
    found = await reads.certain(cluster, "EVENT_r", LAST)  # type: ignore[arg-type]
    assert found is not None
    assert reads.record_of(NAMES, found).sequence == 5  # not the 999 that its publisher wrote
    assert cluster.copies == [3]  # no copy was asked


async def test_a_message_that_a_copy_lacks_is_had_from_the_leader() -> None:
    found = await reads.get(Cluster(3, leader=5), NAMES, "EVENT", 4)  # type: ignore[arg-type]
    assert (found.sequence, found.message, found.tail) == (4, summary(4), summary(4).tail)
    with pytest.raises(NotFound, match="no message 6"):
        await reads.get(Cluster(3, leader=5), NAMES, "EVENT", 6)  # type: ignore[arg-type]


async def test_a_leaders_answer_without_headers_is_read_too() -> None:
    cluster = Cluster(3, leader=5)
    cluster.bare = True
    found = await reads.certain(cluster, "EVENT_r", {"seq": 2})  # type: ignore[arg-type]
    assert found is not None
    assert reads.stored_of(NAMES, found).id == ""
    assert reads.record_of(NAMES, found).message == summary(2)
