from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bus_examples import KINDS, example, ticket
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import codec
from bus.errors import Undecodable
from bus.messages import DeadLetter

GOLDEN = Path(__file__).parent / "golden"
SENDER = {"run": "golden", "role": "tester", "instance": "one"}


def _frame(kind: str) -> bytes:
    return codec.encode(example(KINDS[kind]), **SENDER)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_golden_bytes(kind: str) -> None:
    """Stored bytes stay readable; bytes written now contain them unchanged."""
    path = GOLDEN / f"{kind}.bin"
    if not path.exists() and os.environ.get("SPADE_WRITE_GOLDEN"):
        path.write_bytes(_frame(kind))
    stored = path.read_bytes()
    envelope, message = codec.decode(stored)
    assert message == example(KINDS[kind])
    assert envelope.kind == kind
    assert (envelope.run, envelope.role, envelope.instance) == ("golden", "tester", "one")
    assert envelope.v == 1
    assert envelope.ts > 1_700_000_000_000_000_000
    then, now = msgspec.msgpack.decode(stored), msgspec.msgpack.decode(_frame(kind))
    assert now[:5] == then[:5]
    assert _contains(now[7], then[7])


def _contains(now: Any, then: Any) -> bool:
    """Structs may have got fields: more keys, or more at the end of an array."""
    if isinstance(then, dict):
        return all(key in now and _contains(now[key], value) for key, value in then.items())
    if isinstance(then, list):
        return len(now) >= len(then) and all(map(_contains, now, then))
    return bool(now == then)


def test_every_golden_file_has_its_kind() -> None:
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(KINDS)


@given(text=st.text(), number=st.integers(-(1 << 63), (1 << 63) - 1), frame=st.binary())
def test_round_trip(text: str, number: int, frame: bytes) -> None:
    message = example(DeadLetter, reason=text, sequence=number, frame=frame)
    envelope, back = codec.decode(codec.encode(message, **SENDER))
    assert back == message
    assert envelope.kind == "dead_letter.v1"


@given(data=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_message_or_undecodable(data: bytes) -> None:
    with pytest.raises(Undecodable):
        codec.decode(data)


@given(cut=st.integers(0, 400), flip=st.integers(0, 400), value=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_damaged_frames_never_crash_the_reader(cut: int, flip: int, value: int) -> None:
    data = bytearray(_frame("episode_finished.v1"))
    data[flip % len(data)] = value
    try:
        envelope, _ = codec.decode(bytes(data[: len(data) - cut % len(data)]))
    except Undecodable:
        return
    assert envelope.v == codec.VERSION


def _parts(data: bytes) -> list[Any]:
    parts = msgspec.msgpack.decode(data)
    assert isinstance(parts, list)
    return parts


def test_envelope_and_body_must_agree() -> None:
    parts = _parts(_frame("round_closed.v1"))
    parts[1] = "round_summary.v1"
    with pytest.raises(Undecodable):
        codec.decode(msgspec.msgpack.encode(parts))


def test_arrays_travel_without_growing() -> None:
    plain = len(codec.encode(ticket(1), **SENDER))
    assert plain < 300
    letter = example(KINDS["dead_letter.v1"], frame=b"\x00" * 10_000)
    assert len(codec.encode(letter, **SENDER)) < 10_000 + 400


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_garbage_collector_does_not_look_at_messages(kind: str) -> None:
    envelope, message = codec.decode(_frame(kind))
    assert not gc.is_tracked(message)
    assert not gc.is_tracked(envelope)
