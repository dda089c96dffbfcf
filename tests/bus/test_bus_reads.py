"""Replays in a cluster: whoever answers may be behind the server that stored."""

from __future__ import annotations

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
        self._answer: Callable[[Msg], None] | None = None

    async def wait_connected(self, _: str) -> None: ...

    def watch(self, _: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    async def subscribe(self, _: str, handler: Callable[[Msg], None]) -> None:
        self._answer = handler

    async def unsubscribe(self, _: None) -> None:
        self._answer = None

    async def send(self, _: str, payload: bytes, *, reply: str) -> None:
        wanted, held = msgspec.json.decode(payload)["seq"], self.copies.pop(0)
        assert self._answer is not None
        for sequence in range(wanted, held + 1):
            self._answer(stored(sequence))
        self._answer(end("204" if wanted <= held else "404"))

    async def api(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        assert verb == "STREAM.MSG.GET.EVENT_r"
        if body["seq"] > self.leader:
            raise NotFound("no message")
        return {"message": {"seq": body["seq"]}}


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
