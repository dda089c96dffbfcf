"""Old and new builds on one bus: what was written once is readable, what is too new is put aside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bus_examples import KINDS, example, summary, ticket
from bus_worlds import World, take

from bus import Undecodable, codec
from bus.messages import DeadLetter

Worlds = Callable[..., AbstractAsyncContextManager[World]]
GOLDEN = Path(__file__).parent / "golden"
kinds = pytest.mark.parametrize("kind", sorted(KINDS))


def parts_of(kind: str) -> list[Any]:
    parts = msgspec.msgpack.decode((GOLDEN / f"{kind}.bin").read_bytes())
    assert isinstance(parts, list)
    return parts


@kinds
def test_a_build_with_one_field_more_reads_what_was_written_before(kind: str) -> None:
    """Append a field to the Struct, as the next version of this build may, and read the frozen bytes."""
    old = KINDS[kind]
    fields = [("appended", int, 7), ("more", tuple[str, ...], ())]
    newer = msgspec.defstruct("Newer", fields, bases=(old,), frozen=True, kw_only=True, tag=kind)
    message = msgspec.msgpack.Decoder(newer).decode(msgspec.msgpack.encode(parts_of(kind)[7]))
    assert (message.appended, message.more) == (7, ())
    was = example(old)
    assert {name: getattr(message, name) for name in old.__struct_fields__} == msgspec.structs.asdict(was)


@kinds
def test_this_build_reads_what_a_build_with_one_field_more_writes(kind: str) -> None:
    parts = parts_of(kind)
    parts[7]["appended"] = {"any": ["thing", 1, None]}
    envelope, message = codec.decode(msgspec.msgpack.encode([*parts, None, "appended to the frame"]))
    assert message == example(KINDS[kind])
    assert envelope.kind == kind


@kinds
def test_the_next_version_of_a_kind_is_named_not_guessed(kind: str) -> None:
    parts = parts_of(kind)
    name, _, version = kind.rpartition(".v")
    parts[1] = parts[7]["kind"] = f"{name}.v{int(version) + 1}"
    with pytest.raises(Undecodable) as caught:
        codec.decode(msgspec.msgpack.encode(parts))
    assert caught.value.kind == parts[1]


def too_new(message: Any) -> tuple[str, bytes]:
    """Return the tail and the frame of a message whose envelope is of a later version."""
    parts = msgspec.msgpack.decode(codec.encode(message, run="r", role="x", instance="1"))
    parts[0] = codec.VERSION + 1
    return message.tail, msgspec.msgpack.encode(parts)


async def test_an_envelope_that_is_too_new_ends_as_a_dead_letter(world: Worlds) -> None:
    async with world() as w:
        fact, work = too_new(summary(1)), too_new(ticket(1))
        await w.inject("EVENT", *fact)
        await w.inject("TASK", *work)
        await w.bus.publish_all([summary(2), ticket(2)])
        async with w.bus.follow("EVENT") as source, w.bus.follow("DLQ") as letters:
            assert (await take(source, 1))[0].message == summary(2)
            (first,) = await take(letters, 1)
            async with w.bus.consume("designer", limit=1) as queue:
                (delivery,) = await take(queue, 1)
                assert delivery.message == ticket(2)
                await delivery.ack()
            (second,) = await take(letters, 1)
        for letter, (tail, frame), stream in ((first, fact, "EVENT"), (second, work, "TASK")):
            assert isinstance(letter.message, DeadLetter)
            assert (letter.message.source, letter.message.subject) == (stream, tail)
            assert letter.message.frame == frame
            assert "version" in letter.message.reason
        assert [record.message async for record in w.bus.replay("EVENT")] == [summary(2)]
        assert (await w.bus.stream_info("TASK")).messages == 0
        with pytest.raises(Undecodable):
            await w.bus.get("EVENT", 1)
