"""Looking into a bus, the pure parts: figures, tables, lines, words."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from shell_fakes import batch, evaluation, failed, finished, policy, ready, scored, serving, summary

from bus import codec
from bus.interface import Present
from bus.messages import DeadLetter, Message, RoleHello, RoundClosed, registered
from bus.reads import Stored
from engine.busview import figures, letters, probe, reading, show, table, words
from engine.busview.figures import Beat, ClientSample, ConsumerSample, Sample, StreamSample
from engine.errors import ConfigError

NOW = 1_700_000_000.0


def stored(message: Message, sequence: int = 7) -> Stored:
    frame = codec.encode(message, run="toy", role="agent", instance="agent-0", ts=int(NOW * 1e9))
    return Stored(sequence, message.tail, frame, message.key, NOW)


def stream(name: str, **given: Any) -> StreamSample:
    return StreamSample(**({"stream": name, "messages": 0, "bytes": 0, "first": 1, "last": 0} | given))


def consumer(name: str, **given: Any) -> ConsumerSample:
    values = dict.fromkeys(("pending", "ack_pending", "redelivered", "waiting", "delivered"), 0)
    return ConsumerSample(**({"stream": "TASK", "consumer": name, "kind": "queue"} | values | given))


def client(number: int, **given: Any) -> ClientSample:
    values = dict.fromkeys(("pending_bytes", "in_messages", "out_messages", "in_bytes", "out_bytes"), 0)
    names = {
        "id": f"s:{number}",
        "role": "agent",
        "instance": f"agent-{number}",
        "rtt_ms": 0.3,
        "active_at": NOW,
    }
    return ClientSample(**(names | values | given))


def sample(at: float, **given: Any) -> Sample:
    values: dict[str, Any] = {"streams": (), "consumers": (), "clients": (), "beats": ()}
    return Sample(**({"run": "toy", "at": at, "server": "nats-server 2.15.1"} | values | given))


def test_rates_are_what_changed_between_two_looks() -> None:
    before = sample(
        NOW,
        streams=(stream("TASK", last=10), stream("DLQ", messages=3)),
        consumers=(consumer("agent", delivered=5), consumer("designer", delivered=1)),
        clients=(client(1, in_messages=100, out_bytes=1000),),
    )
    after = sample(
        NOW + 2,
        streams=(
            stream("TASK", messages=4, last=16, limit_messages=8, limit_bytes=1000, bytes=100, last_at=NOW),
            stream("EVENT", last=3, last_at=NOW - 8),
            stream("DLQ", messages=3),
        ),
        consumers=(consumer("agent", delivered=9, oldest_at=NOW - 1), consumer("designer", delivered=3)),
        clients=(client(1, in_messages=104, out_bytes=5000), client(2, in_messages=7)),
        beats=(Beat(role="agent", instance="agent-1", state="running", at=NOW + 1),),
    )
    top = figures.compare(after, before)
    assert (top.interval_s, top.dead_letters, top.event_age_s) == (2.0, 3, 10.0)
    task, event, _ = top.streams
    assert (task.in_per_s, task.out_per_s, task.share, task.last_age_s) == (3.0, 3.0, 0.5, 2.0)
    assert (event.in_per_s, event.share) == (None, None)
    assert [(one.consumer, one.out_per_s) for one in top.consumers] == [("agent", 2.0), ("designer", 1.0)]
    assert top.consumers[0].oldest_age_s == 3.0
    known, fresh = top.clients
    assert (known.in_per_s, known.out_bytes_per_s, known.state, known.heard_s) == (
        2.0,
        2000.0,
        "running",
        1.0,
    )
    assert (fresh.in_per_s, fresh.state) == (None, None)


def test_a_single_look_has_no_rates() -> None:
    top = figures.compare(sample(NOW, streams=(stream("EVENT", last=3),)), None)
    assert top.interval_s is None
    assert (top.streams[0].in_per_s, top.streams[0].out_per_s) == (None, None)


def test_a_counter_that_went_back_has_no_rate() -> None:
    before = sample(NOW, streams=(stream("EVENT", last=30),), consumers=(consumer("agent", delivered=9),))
    after = sample(NOW + 1, streams=(stream("EVENT", last=3),), consumers=(consumer("agent", delivered=1),))
    top = figures.compare(after, before)
    assert (top.streams[0].in_per_s, top.consumers[0].out_per_s) == (None, None)


def test_roles_that_are_only_heard_of_are_listed() -> None:
    beat = Beat(role="scorer", instance="scorer-0", state="running", at=NOW - 30)
    top = figures.compare(sample(NOW, clients=None, beats=(beat,)), None)
    assert not top.clients_known
    assert [(one.role, one.heard_s, one.rtt_ms) for one in top.clients] == [("scorer", 30.0, None)]


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0.001, 1e6), st.floats(-1e6, 1e6))
def test_figures_are_never_negative(first: int, second: int, seconds: float, skew: float) -> None:
    before = sample(NOW, streams=(stream("EVENT", last=first),))
    after = sample(NOW + seconds, streams=(stream("EVENT", last=second, last_at=NOW + skew),))
    top = figures.compare(after, before)
    assert top.event_age_s is not None
    assert top.event_age_s >= 0
    assert (top.streams[0].in_per_s or 0) >= 0


@pytest.mark.parametrize("width", [80, 140])
def test_the_screen_fits_and_shows_what_matters(width: int) -> None:
    top = figures.compare(
        sample(
            NOW + 1,
            streams=(
                stream("TASK", messages=19_000, last=19_000, limit_messages=20_000),
                stream("DLQ", messages=2),
            ),
            consumers=(consumer("agent", pending=18_000, ack_pending=64, oldest_at=NOW - 7200),),
            clients=(client(1, in_messages=1000),),
            beats=(Beat(role="learner", instance="learner-0", state="running", at=NOW - 60),),
        ),
        sample(NOW, streams=(stream("TASK", last=18_900),), clients=(client(1),)),
        live=False,
    )
    screen = io.StringIO()
    Console(file=screen, width=width, no_color=True).print(table.screen(top, width))
    text = screen.getvalue()
    for part in (
        "toy",
        "its run rests",
        "dead letters 2",
        "19.0 k",
        "95%",
        "18.0 k",
        "2.0 h",
        "agent/agent-1",
    ):
        assert part in text
    for part in ("learner/learner-0", "100", "1.0 k", "1.0 min"):
        assert part in text
    assert "…" not in text


MESSAGES: list[Message] = [
    policy(3, fence=2), batch(1, 2), serving(2), evaluation(2), ready("d1"), scored("d1"),
    finished("e1"), failed("e2"), summary(1),
    RoundClosed(
        round=1, plays=1, designs=1, agent_samples=1, designer_samples=1, zero_variance_groups=0, groups=1,
        final=False,
    ),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_one_line_and_one_json_object(message: Message) -> None:
    seen = show.view("EVENT", stored(message))
    assert seen.error is None
    line = show.line(seen, NOW)
    assert "\n" not in line
    assert f"EVENT 7  agent/agent-0  {codec.kind_of(message)}" in line
    assert "=" in line
    record = json.loads(json.dumps(show.record(seen)))
    assert (record["sequence"], record["id"], record["time"]) == (
        7,
        message.key,
        "2023-11-14T22:13:20.000+00:00",
    )
    assert set(record["body"]) == set(message.__struct_fields__)


def test_what_scripts_read_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    seen = show.record(show.view("EVENT", stored(failed("e1"))))
    names = [*seen, *letters.letter_of(letter(1, "x")).record(), "obstacle", "message", "frame"]
    lists = figures.StreamFigures, figures.ConsumerFigures, figures.ClientFigures, figures.PresentFigures
    for struct in (figures.Top, *lists):
        names += struct.__struct_fields__
    assert [name for name in names if f"`{name}`" not in text] == []


def test_every_kind_has_fields_that_exist() -> None:
    own = {tag: kind for tag, kind in registered().items() if kind.__module__.startswith("bus.")}
    stems = {tag.partition(".")[0]: kind for tag, kind in own.items()}
    for stem, names in show.MAIN.items():
        assert set(names.split()) <= set(stems[stem].__struct_fields__), stem
    assert set(stems) - set(show.MAIN) == {"control", "heartbeat", "role_hello", "role_bye"}


def test_arrays_are_told_by_type_and_shape() -> None:
    record = show.record(show.view("EVENT", stored(finished("e1"))))
    segment = record["body"]["segments"][0]
    assert segment["tokens"] == {"bytes": 16, "dtype": "int32", "shape": [4]}
    assert segment["mask"] == {"bytes": 4, "dtype": "uint8", "shape": [4]}
    assert segment["logprobs"] == {"bytes": 16, "dtype": "float32", "shape": [4]}


def test_long_texts_are_cut_and_versions_told_with_their_fence() -> None:
    line = show.line(show.view("EVENT", stored(failed("e" * 500))), NOW)
    assert "episode=" + "e" * 59 + "…" in line
    assert len(show.line(show.view("EVENT", stored(failed("e" * 500))), NOW, width=80)) == 80
    assert "version=3@2" in show.line(show.view("EVENT", stored(policy(3, fence=2))), NOW)


def test_a_kind_of_a_newer_build_is_shown_as_far_as_it_can_be() -> None:
    outer = list(msgspec.msgpack.decode(stored(failed("e1")).frame))
    outer[1] = "episode_failed.v9"
    seen = show.view("EVENT", Stored(1, "event.agent.failed", msgspec.msgpack.encode(outer), "", NOW))
    assert seen.error == "unknown kind or version"
    assert "UNREADABLE" in show.line(seen, NOW)
    assert "episode=e1" in show.line(seen, NOW)
    assert show.record(seen)["body"]["episode"] == "e1"
    assert seen.is_kind("episode_failed")


def test_what_a_model_wrote_cannot_drive_a_terminal() -> None:
    evil = msgspec.structs.replace(failed("e\x1b[2J\n1"), reason="\x9b31m red")
    frame = codec.encode(evil, run="toy", role="a\x1b[", instance="b\nc", ts=1)
    line = show.line(show.view("EVENT", Stored(1, "event.x", frame, "", NOW)), NOW)
    assert line.isprintable()
    assert words.cut("a\x1b[31mb", 20) == "a [31mb"


@given(st.binary(max_size=200))
def test_any_bytes_can_be_shown(frame: bytes) -> None:
    seen = show.view("EVENT", Stored(1, "event.x", frame, "", NOW))
    assert "\n" not in show.line(seen, NOW)
    json.dumps(show.record(seen))
    assert letters.letter_of(Stored(1, "dlq.event", frame, "", NOW)).number == 1


def letter(number: int, reason: str, source: str = "TASK", subject: str = "task.agent.play.e1") -> Stored:
    frame = stored(failed("e1")).frame
    message = DeadLetter(
        source=source, sequence=number * 10, subject=subject, reason=reason, attempts=2, frame=frame
    )
    return stored(message, number)


def test_letters_are_grouped_by_reason_whatever_numbers_it_names() -> None:
    grouping = letters.Grouping()
    for one in (
        letter(1, "lost 12 of 13"),
        letter(2, "lost 1 of 4"),
        letter(3, "other"),
        Stored(4, "", b"x", "", NOW),
    ):
        grouping.add(letters.letter_of(one))
    found = grouping.groups()
    assert [(group.count, group.reason, group.number) for group in found[:2]] == [
        (2, "lost 1 of 4", 2),
        (1, "other", 3),
    ]
    assert found[2].reason.startswith("damaged letter")
    assert found[0].kind == "episode_failed.v1"


def test_a_letter_that_cannot_be_tried_again_says_why() -> None:
    assert letters.obstacle(letters.letter_of(letter(1, "x"))) is None
    for stored_letter, why in (
        (letter(1, "x (cut from 9000000 bytes)"), "too long"),
        (letter(1, "x", source="EVENT"), "belongs to TASK"),
        (letter(1, "x", subject="nowhere.at.all"), "no stream"),
        (Stored(1, "dlq.task", b"junk", "", NOW), "cannot be read"),
    ):
        assert why in (letters.obstacle(letters.letter_of(stored_letter)) or "")


@pytest.mark.parametrize(
    ("stream", "tails", "kind", "wanted"),
    [
        ("", (), "", reading.Filter("EVENT")),
        ("sample", (), "", reading.Filter("SAMPLE")),
        ("", ("task.agent.>",), "", reading.Filter("TASK", ("task.agent.>",))),
        ("", (), "design_rejected", reading.Filter("EVENT", ("event.designer.rejected",), "design_rejected")),
        ("", (), "sample_ready", reading.Filter("SAMPLE", (), "sample_ready")),
        ("", (), "batch_trained.v1", reading.Filter("EVENT", ("event.learner.trained",), "batch_trained.v1")),
    ],
)
def test_what_is_read_is_told_from_what_was_asked(
    stream: str, tails: tuple[str, ...], kind: str, wanted: reading.Filter
) -> None:
    assert reading.choose(stream, tails, kind) == wanted


@pytest.mark.parametrize(
    ("stream", "tails", "kind", "said"),
    [
        ("NOSUCH", (), "", "Streams: TASK, EVENT"),
        ("", (), "nosuch", "design_rejected"),
        ("EVENT", ("task.>",), "", "lies in stream TASK"),
        ("", (), "heartbeat", "not stored"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(
    stream: str, tails: tuple[str, ...], kind: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        reading.choose(stream, tails, kind)


def test_what_the_server_says_is_understood() -> None:
    answer = {
        "data": {
            "server_id": "S",
            "connections": [
                {
                    "cid": 38, "name": "spade.toy.agent.agent-0", "rtt": "273µs", "in_msgs": 12,
                    "out_msgs": 11,
                    "in_bytes": 5154, "out_bytes": 332, "pending_bytes": 5,
                    "last_activity": "2026-11-29T19:57:01.532843677Z",
                },
                {"cid": 39, "name": "spade.other.agent.agent-0"},
                {"cid": 40},
            ],
        }
    }  # fmt: skip
    (found,) = probe.client_samples("toy", answer)
    assert (found.id, found.role, found.instance, found.rtt_ms) == ("S:38", "agent", "agent-0", 0.273)
    assert (found.in_messages, found.pending_bytes) == (12, 5)
    assert list(probe.client_samples("toy", {})) == []
    assert probe.milliseconds("1m2.5s") == 62_500.0
    assert probe.moment("0001-01-01T00:00:00Z") is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (words.span(0.04), "0.0 s"), (words.span(42), "42 s"), (words.span(300), "5.0 min"),
        (words.span(86400 * 40), "40 d"), (words.span(None), "-"), (words.span(-1), "0.0 s"),
        (words.size(0), "0 B"), (words.size(1536), "1.5 kB"), (words.size(3.2e9), "3.2 GB"),
        (words.amount(999), "999"), (words.amount(12_345), "12.3 k"), (words.amount(4_100_000), "4.1 M"),
        (words.rate(0), "0"), (words.rate(0.42), "0.4"), (words.rate(31.4), "31"),
        (words.share(0.034), "3.4%"),
        (words.share(1), "100%"), (words.cut("a\n b", 9), "a b"), (words.cut("abcdef", 4), "abc…"),
    ],
)  # fmt: skip
def test_figures_are_told_in_words(text: str, wanted: str) -> None:
    assert text == wanted


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("15m", 900), ("2h", 7200), ("1.5d", 129600)])
def test_durations_are_read(text: str, seconds: float) -> None:
    assert words.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "-2h", "2 years"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Examples"):
        words.seconds_of(text)


def test_who_is_present_is_shown_with_slots_policy_and_ages() -> None:
    old = RoleHello(role="agent", instance="agent-0", since=int((NOW - 120) * 1e9), slots=8, version=3)
    new = RoleHello(role="scorer", instance="scorer-0", since=0, state="draining", host="far")
    there = [probe.present_figures(Present(hello, NOW - 2, 2.0)) for hello in (old, new)]
    assert (there[0].up_s, there[0].age_s, there[0].version) == (pytest.approx(120), 2.0, 3)
    assert (there[1].up_s, there[1].version, there[1].slots) == (None, None, 0)
    top = figures.compare(sample(NOW, present=tuple(there)), None)
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table.screen(top, 140))
    lines = [line.split() for line in console.export_text().splitlines() if "/" in line]
    words_of = {line[1]: line[2:] for line in lines if len(line) > 2}
    assert words_of["agent/agent-0"][:6] == ["running", "8", "3", "2.0", "min", "2.0"]
    assert words_of["scorer/scorer-0"][:4] == ["draining", "0", "-", "-"]
    assert "far" in words_of["scorer/scorer-0"]
