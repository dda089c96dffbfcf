from __future__ import annotations

import re

import pytest
from bus_examples import KINDS, example
from hypothesis import given
from hypothesis import strategies as st
from scenes.memory_bus import matches, overlap

from bus.errors import BusError
from bus.subjects import (
    CONSUMERS,
    STREAMS,
    Names,
    consumer_config,
    stream_config,
    stream_of,
)

tokens = st.sampled_from(["a", "b", "c"])
tails = st.lists(tokens, min_size=1, max_size=4).map(".".join)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    parts = draw(st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3))
    return ".".join([*parts, ">"] if draw(st.booleans()) else parts)


def _regex(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern).replace(r"\*", r"[^.]+")
    return re.compile(re.sub(r"\\?>$", r".+", text) + r"\Z")


@given(pattern=patterns(), tail=tails)
def test_matches_like_the_broker(pattern: str, tail: str) -> None:
    assert matches(pattern, tail) == bool(_regex(pattern).match(tail))


@given(first=patterns(), second=patterns(), tail=tails)
def test_common_tail_means_overlap(first: str, second: str, tail: str) -> None:
    if matches(first, tail) and matches(second, tail):
        assert overlap(first, second)
    assert overlap(first, second) == overlap(second, first)


@pytest.mark.parametrize("run", ["", "Upper", "a.b", "a b", "a*", "ü", "x" * 65])
def test_run_names_that_cannot_be_tokens_are_refused(run: str) -> None:
    with pytest.raises(BusError, match="run name"):
        Names(run)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_stored_kind_lies_in_its_stream(kind: str) -> None:
    message = example(KINDS[kind])
    if message.stream:
        assert stream_of(message.tail) == message.stream
    else:
        with pytest.raises(BusError):
            stream_of(message.tail)


def test_limits_leave_room_in_the_store() -> None:
    shares = sum(stream.share for stream in STREAMS.values())
    assert shares < 1.0


def test_task_streams_are_generous_and_push_back() -> None:
    config = stream_config(Names("r"), STREAMS["TASK"], store_bytes=1 << 34)
    assert config["max_msgs"] == 20_000
    assert config["discard"] == "new"
    assert config["retention"] == "workqueue"


def test_work_is_delivered_without_end() -> None:
    config = consumer_config(Names("r"), CONSUMERS["agent"])
    assert config["filter_subject"] == "spade.r.task.agent.>"
    assert config["max_deliver"] == -1


@pytest.mark.parametrize("key", ["", ".a", "a..b", "a b", "a*", "ä"])
def test_keys_are_checked(key: str) -> None:
    with pytest.raises(BusError, match="characters"):
        Names("r").key("STATE", key)


def test_a_run_may_rest_for_any_time():
    """Streams that a start reads have a limit in bytes and none in age, so that a run can rest."""
    names = Names("t")
    needed = [stream for kind, stream in STREAMS.items() if kind != "DLQ"]
    configs = [stream_config(names, stream, store_bytes=1 << 30) for stream in needed]
    assert [config.get("max_age", 0) for config in configs] == [0] * len(configs)
    assert all(config["max_bytes"] > 0 for config in configs)
