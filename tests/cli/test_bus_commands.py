"""``spade bus``: looking into the streams of a run that goes on, and of one that rests."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import pytest
from brokers import TOKEN, plain_server
from brokers import broker as secured
from shell_fakes import config, failed, finished, policy, ready

from bus import Limits, NatsBus, codec, connect, provision
from bus.messages import DeadLetter, EpisodeRequest, Heartbeat, Message, RoleHello
from bus.publish import Publisher
from engine import cli
from engine.busview import letters, reading
from engine.config import RunConfig
from engine.run import RunDirectory
from engine.running.supervisor import Address


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]


Spade = Callable[..., Result]


@pytest.fixture
def spade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Spade:
    """Call ``spade bus`` in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["spade", "bus", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        printed = capsys.readouterr()
        return Result(int(caught.value.code or 0), printed.out, printed.err)

    return call


def refused(result: Result, *parts: str, code: int) -> None:
    """The command failed with one paragraph that says all of ``parts``, and no trace."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with plain_server(tmp_path_factory.mktemp("broker")) as url:
        yield url


class Toy:
    """A run whose bus is the module's server."""

    def __init__(self, url: str, directory: RunDirectory) -> None:
        self.url, self.directory, self.run = url, directory, directory.root.name

    @asynccontextmanager
    async def bus(self, role: str = "agent") -> AsyncIterator[NatsBus]:
        async with connect(self.url, run=self.run, role=role, instance=f"{role}-0", token=TOKEN) as bus:
            yield bus

    def do(self, work: Callable[[NatsBus], Awaitable[Any]]) -> Any:
        """Run ``work`` with a client of the run."""

        async def with_bus() -> Any:
            async with self.bus() as bus:
                return await work(bus)

        return anyio.run(with_bus)

    def publish(self, *messages: Message) -> None:
        self.do(lambda bus: bus.publish_all(messages))

    def inject(self, stream: str, tail: str, frame: bytes, key: str) -> None:
        """Store bytes as they are."""
        self.do(
            lambda bus: bus.publisher.send(
                bus.names.stream(stream), bus.names.subject(tail), frame, {}, message_id=key
            )
        )

    def stored(self, stream: str) -> list[tuple[str, str, bytes]]:
        """Return (tail, id, bytes) of all messages."""

        async def read(bus: NatsBus) -> list[tuple[str, str, bytes]]:
            info = await bus.stream_info(stream)
            found = reading.between(bus, reading.Filter(stream), info.first, info.last)
            return [(one.tail, one.id, one.frame) async for one, _ in found]

        result: list[tuple[str, str, bytes]] = self.do(read)
        return result


def make(url: str, runs: Path, name: str) -> Toy:
    """Provision a run on a server and write its directory."""
    toy = config(runs, run=RunConfig(name=name, directory=str(runs), steps=2))
    directory = RunDirectory.of(toy)
    with directory.locked():
        directory.adopt(toy)
        directory.database.touch()
    anyio.run(lambda: provision(url, run=name, token=TOKEN, store_gb=0.25))
    (directory.root / "bus.json").write_bytes(msgspec.json.encode(Address(url, TOKEN, name)))
    return Toy(url, directory)


@pytest.fixture
def toy(server: str, tmp_path: Path) -> Iterator[Toy]:
    """A run that goes on: somebody holds it."""
    made = make(server, tmp_path / "runs", f"toy-{secrets.token_hex(4)}")
    with made.directory.locked():
        yield made
    made.do(remove)


async def remove(bus: NatsBus) -> None:
    for name in (await bus.connection.api("STREAM.NAMES", {}))["streams"]:
        await bus.connection.api(f"STREAM.DELETE.{name}")


@pytest.fixture(scope="module")
def rested(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A run that rests: its store lies in its directory, and no server runs."""
    runs = tmp_path_factory.mktemp("rested") / "runs"
    with plain_server(runs / "rest" / "bus") as url:
        made = make(url, runs, "rest")
        made.publish(policy(0), ready("d1"), finished("e1"), letter(3))
    return made


def play(number: int) -> EpisodeRequest:
    return EpisodeRequest(
        episode=f"e{number}", design="d1", environment="f", skill="s", arm="plain", round=0, index=number,
        seed=1, source="", hint=None, max_turns=5,
    )  # fmt: skip


def letter(number: int, reason: str = "delivered too often", **given: Any) -> DeadLetter:
    work = play(number)
    frame = codec.encode(work, run="toy", role="scorer", instance="scorer-0", ts=1)
    values = {"source": "TASK", "sequence": number, "subject": work.tail, "attempts": 9, "frame": frame}
    return DeadLetter(**(values | {"reason": reason} | given))


# top


def test_top_tells_depths_limits_and_clients(spade: Spade, toy: Toy) -> None:
    command = ["top", "--once", "--json", "--interval", "0.2", "--run", str(toy.directory.root)]

    async def with_others() -> Result:
        hello = RoleHello(role="agent", instance="agent-0", since=time.time_ns(), slots=3)
        async with (
            toy.bus("agent") as bus,
            bus.consume("agent", limit=1) as work,
            bus.follow("EVENT"),
            bus.announce(hello),
        ):
            await bus.publish_all([*(play(number) for number in range(4)), letter(9), finished("e1")])
            delivery = await anext(work)
            result = await anyio.to_thread.run_sync(in_child, command)
            await delivery.ack()
            return result

    result = anyio.run(with_others)
    assert result.returncode == 0, result.stderr
    (top,) = result.records
    assert (top["run"], top["live"], top["dead_letters"]) == (toy.run, True, 1)
    assert 0.1 <= top["interval_s"] < 10
    streams = {one["stream"]: one for one in top["streams"]}
    assert (streams["TASK"]["messages"], streams["TASK"]["first"], streams["TASK"]["last"]) == (4, 1, 4)
    assert streams["TASK"]["share"] == pytest.approx(4 / streams["TASK"]["limit_messages"])
    assert streams["EVENT"]["in_per_s"] == 0.0
    assert top["event_age_s"] < 60
    reader = next(one for one in top["consumers"] if one["kind"] == "reader")
    assert (reader["stream"], reader["client"]) == ("EVENT", "agent/agent-0")
    agent = next(one for one in top["consumers"] if one["consumer"] == "agent")
    assert (agent["pending"], agent["ack_pending"], agent["kind"]) == (3, 1, "queue")
    assert 0 <= agent["oldest_age_s"] < 60
    (client,) = top["clients"]
    assert (client["role"], client["instance"]) == ("agent", "agent-0")
    (there,) = top["present"]
    assert (there["role"], there["instance"], there["slots"]) == ("agent", "agent-0", 3)
    assert 0 <= there["age_s"] <= there["up_s"] < 60
    assert client["rtt_ms"] > 0
    assert client["in_bytes_per_s"] is not None


def in_child(arguments: Sequence[str]) -> Result:
    command = [sys.executable, "-m", "engine.cli", "bus", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return Result(done.returncode, done.stdout, done.stderr)


def test_top_is_a_table_for_people(spade: Spade, toy: Toy) -> None:
    toy.publish(finished("e1"))
    result = spade("top", "--interval", "0.1")
    assert result.returncode == 0, result.stderr
    for part in (f"spade bus · {toy.run}", "nats-server 2.", "EVENT", "TASK designer", "no client"):
        assert part in result.stdout


def test_top_does_without_clients_where_the_server_does_not_tell(
    spade: Spade, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.busview.probe._CONNECTIONS", "nobody.answers.this")
    (top,) = spade("top", "--once", "--json", "--interval", "0.1").records
    assert (top["clients_known"], top["clients"]) == (False, [])
    assert top["streams"]


@pytest.mark.slow
def test_top_goes_on_until_a_signal_and_hears_heartbeats(toy: Toy) -> None:
    command = [sys.executable, "-m", "engine.cli", "bus", "top", "--json", "--interval", "0.1"]
    with subprocess.Popen(
        [*command, "--run", str(toy.directory.root)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        toy.publish(Heartbeat(role="learner", instance="learner-0", state="running", statistics={}))
        for line in process.stdout:
            if any(
                one["role"] == "learner" and one["state"] == "running" for one in json.loads(line)["clients"]
            ):
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


@pytest.mark.slow
def test_the_supervisors_key_opens_everything(spade: Spade, tmp_path: Path) -> None:
    with secured(tmp_path / "broker", "keyed", tls=True) as running:
        url, keys, ca = running.url, running.seed().parent, str(running.ca)

        async def with_agent() -> Result:
            await provision(url, run="keyed", store_gb=0.25, **running.login())
            async with connect(
                url, run="keyed", role="agent", instance="agent-0", **running.login("agent")
            ) as bus:
                await bus.publish_all([finished("e1"), letter(1)])
                command = ["top", "--once", "--json", "--interval", "0.1"]
                return await anyio.to_thread.run_sync(
                    in_child, [*command, "--connect", url, "--credentials", str(keys), "--ca", ca]
                )

        result = anyio.run(with_agent)
        assert (result.returncode, result.stderr) == (0, "")
        (top,) = result.records
        assert [(one["role"], one["rtt_ms"] is not None) for one in top["clients"]] == [("agent", True)]
        there = ("--connect", url, "--run", "keyed", "--ca", ca, "--credentials", str(keys))
        assert len(spade("tail", *there).stdout.splitlines()) == 1
        assert spade("dlq", "retry", "1", *there).returncode == 0
        assert len(spade("replay", "TASK", *there).stdout.splitlines()) == 1
        refused(spade("tail", *there[:-1], str(tmp_path)), "no key of role supervisor", code=1)


# tail


def test_tail_shows_the_last_messages(spade: Spade, toy: Toy) -> None:
    toy.publish(policy(0), *(finished(f"e{number}") for number in range(30)), failed("x"))
    lines = spade("tail").stdout.splitlines()
    assert len(lines) == 20
    assert "episode_failed.v1  episode=x" in lines[-1]
    assert "EVENT 32  agent/agent-0" in lines[-1]
    assert len(spade("tail", "-n", "100").stdout.splitlines()) == 32


def test_tail_finds_a_rare_kind_far_back(spade: Spade, toy: Toy) -> None:
    toy.publish(failed("x"), policy(0), *(finished(f"e{number}") for number in range(2000)))
    (line,) = spade("tail", "--kind", "policy_published").stdout.splitlines()
    assert "policy_published.v1  step=0" in line.replace("version=0  ", "")
    (found,) = spade("tail", "event.agent.failed", "--json").records
    assert (found["kind"], found["body"]["episode"], found["error"]) == ("episode_failed.v1", "x", None)
    assert spade("tail", "--kind", "server_lost").stdout == ""


def test_tail_bears_what_it_cannot_read(spade: Spade, toy: Toy) -> None:
    toy.publish(finished("e1"))
    toy.inject("EVENT", "event.agent.finished", b"\xc1 no frame", "junk")
    good, bad = spade("tail", "--json").records
    assert good["body"]["segments"][0]["tokens"] == {"bytes": 16, "dtype": "int32", "shape": [4]}
    assert (bad["kind"], bad["body"], bad["size"]) == ("", None, 10)
    assert "no frame" in bad["error"]
    assert "UNREADABLE" in spade("tail").stdout
    assert spade("dlq", "list").stdout == "There are no dead letters.\n"


@pytest.mark.slow
def test_tail_follows_what_comes(toy: Toy) -> None:
    toy.publish(finished("e0"))
    command = [
        sys.executable,
        "-m",
        "engine.cli",
        "bus",
        "tail",
        "--follow",
        "--run",
        str(toy.directory.root),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "episode=e0" in process.stdout.readline()
        toy.publish(finished("e1"), finished("e2"))
        assert "episode=e1" in process.stdout.readline()
        assert "episode=e2" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.slow
def test_they_go_on_when_the_server_comes_back(tmp_path: Path) -> None:
    with secured(tmp_path / "broker", "again") as running:
        url, seed = running.url, str(running.seed())
        login = running.login("agent")

        async def publish(*messages: Message) -> None:
            async with connect(url, run="again", role="agent", instance="agent-0", **login) as bus:
                await bus.publish_all(messages)

        anyio.run(lambda: provision(url, run="again", store_gb=0.25, **running.login()))
        anyio.run(publish, finished("e0"))
        command = [sys.executable, "-m", "engine.cli", "bus"]
        where = ["--connect", url, "--credentials", seed]
        top = [*command, "top", "--json", "--interval", "0.1", *where]
        with (
            subprocess.Popen(
                [*command, "tail", "--follow", *where], stdout=subprocess.PIPE, text=True
            ) as tail,
            subprocess.Popen(top, stdout=subprocess.PIPE, text=True) as watch,
        ):
            assert tail.stdout is not None
            assert watch.stdout is not None
            assert "episode=e0" in tail.stdout.readline()
            watch.stdout.readline()
            for number in (1, 2, 3):
                running.kill("n1")
                running.start("n1")
                anyio.run(publish, finished(f"e{number}"))
                assert f"episode=e{number}" in tail.stdout.readline()
                wanted = number + 1
                assert any(json.loads(line)["streams"][1]["last"] == wanted for line in watch.stdout)
            for process in (tail, watch):
                process.send_signal(signal.SIGINT)
                assert process.wait(10) == 0


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_it_quietly(toy: Toy) -> None:
    toy.publish(*(finished(f"e{number}") for number in range(2000)))
    command = f"{sys.executable} -m engine.cli bus replay EVENT --json --run {toy.directory.root} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["sequence"] == 1


# replay


def test_replay_prints_a_part(spade: Spade, toy: Toy) -> None:
    toy.publish(*(finished(f"e{number}") for number in range(6)), failed("x"))
    found = spade("replay", "EVENT", "--from", "3", "--to", "4", "--json", "--frames").records
    assert [one["sequence"] for one in found] == [3, 4]
    assert all(one["frame"] for one in found)
    assert len(spade("replay", "event", "--since", "1h", "--json").records) == 7
    assert spade("replay", "EVENT", "--since", "0s", "--json").records == []
    assert len(spade("replay", "EVENT", "--since", "9999999w", "--json").records) == 7
    (line,) = spade("replay", "EVENT", "--tail", "event.agent.failed").stdout.splitlines()
    assert "episode=x" in line


def test_replay_into_another_run_keeps_bytes_ids_and_order(
    spade: Spade, toy: Toy, server: str, tmp_path: Path
) -> None:
    toy.publish(*(finished(f"e{number}") for number in range(50)), failed("x"))
    toy.inject("EVENT", "event.agent.finished", b"\xc1 no frame", "junk")
    other = make(server, tmp_path / "runs", f"{toy.run}-copy")
    arguments = ("replay", "EVENT", "--run", toy.run, "--into", server, "--into-run", other.run)
    arguments += ("--into-token", TOKEN)
    dry = spade(*arguments)
    assert "52 messages" in dry.stdout
    assert "--yes" in dry.stdout
    assert other.stored("EVENT") == []
    assert "52 messages" in spade(*arguments, "--yes").stdout
    assert other.stored("EVENT") == toy.stored("EVENT")
    again = spade(*arguments, "--yes")
    assert "0 messages (0 B) were stored" in again.stdout
    assert "52 were known" in again.stdout
    assert len(other.stored("EVENT")) == 52


def test_replay_again_in_place_is_swallowed_while_it_is_known(spade: Spade, toy: Toy) -> None:
    toy.publish(play(1), play(2))
    assert "2 messages" in spade("replay", "TASK", "--republish").stdout
    result = spade("replay", "TASK", "--republish", "--yes")
    assert "2 were known there already" in result.stdout
    assert len(toy.stored("TASK")) == 2


def test_a_target_that_is_full_stops_it_and_says_where(
    spade: Spade, toy: Toy, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.publish(*(play(number) for number in range(5)))
    other = make(server, tmp_path / "runs", f"{toy.run}-copy")

    async def limit(bus: NatsBus) -> None:
        name = bus.names.stream("TASK")
        settings = (await bus.connection.api(f"STREAM.INFO.{name}"))["config"]
        await bus.connection.api(f"STREAM.UPDATE.{name}", {**settings, "max_msgs": 2})

    other.do(limit)
    monkeypatch.setattr("engine.busview.place.LIMITS", Limits(full_seconds=0.2))
    arguments = ("replay", "TASK", "--run", toy.run, "--into", server, "--into-run", other.run)
    result = spade(*arguments, "--into-token", TOKEN, "--yes")
    refused(result, "Stopped after sequence 2, 2 messages were stored", "room", "--from 3", code=1)


def test_replay_into_a_run_that_is_not_there_is_refused(spade: Spade, toy: Toy, server: str) -> None:
    toy.publish(finished("e1"))
    result = spade("replay", "EVENT", "--into", server, "--into-run", "nosuch", "--into-token", TOKEN)
    refused(result, "knows no run nosuch", "spade bus provision", code=2)


# dead letters


def test_letters_are_listed_by_reason(spade: Spade, toy: Toy) -> None:
    toy.publish(letter(1), letter(2), letter(3, "an agent cannot answer 7"))
    toy.inject("DLQ", "dlq.task", b"no letter", "junk")
    text = spade("dlq", "list").stdout
    assert "4 dead letters" in text
    assert "2  TASK episode_request.v1  delivered too often" in text
    assert "damaged letter: no frame" in text
    assert "DAMAGED" in text
    records = spade("dlq", "list", "--json").records
    assert [(one["number"], one["source"], one["sequence"]) for one in records[:2]] == [
        (1, "TASK", 1),
        (2, "TASK", 2),
    ]
    assert records[3]["damaged"].startswith("no frame")


def test_a_letter_is_shown_with_its_message(spade: Spade, toy: Toy) -> None:
    toy.publish(letter(1))
    toy.inject("DLQ", "dlq.task", b"no letter", "junk")
    (shown,) = spade("dlq", "show", "1", "--json").records
    assert (shown["reason"], shown["obstacle"]) == ("delivered too often", None)
    assert shown["message"]["body"]["episode"] == "e1"
    assert '"episode": "e1"' in spade("dlq", "show", "1").stdout
    assert "cannot be read" in spade("dlq", "show", "2").stdout
    refused(spade("dlq", "show", "9"), "no dead letter 9", code=1)


def test_a_retry_brings_the_message_back_once(spade: Spade, toy: Toy) -> None:
    toy.publish(play(1))
    ((_, _, frame),) = toy.stored("TASK")

    async def give_up(bus: NatsBus) -> None:
        async with bus.consume("agent", limit=1) as work:
            await (await anext(work)).term("a bad day")

    toy.do(give_up)
    assert toy.stored("TASK") == []
    assert "1 letters were published again." in spade("dlq", "retry", "1").stdout
    assert [(tail, data) for tail, _, data in toy.stored("TASK")] == [(play(1).tail, frame)]
    assert toy.stored("DLQ") == []
    refused(spade("dlq", "retry", "1"), "no dead letter 1", code=1)
    assert len(toy.stored("TASK")) == 1


def test_a_retry_that_was_cut_short_has_one_effect(
    spade: Spade, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.publish(letter(1))

    async def die(*_: object) -> bool:
        raise RuntimeError("killed before the letter was removed")

    with monkeypatch.context() as patched:
        patched.setattr(letters, "drop", die)
        assert spade("dlq", "retry", "1").returncode == 1
    assert (len(toy.stored("TASK")), len(toy.stored("DLQ"))) == (1, 1)

    async def never(*_: object, **__: object) -> None:
        raise AssertionError("the server may have forgotten the id by now")

    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "send", never)
        result = spade("dlq", "retry", "--all")
    assert "0 letters were published again, 1 had been before." in result.stdout
    assert (len(toy.stored("TASK")), len(toy.stored("DLQ"))) == (1, 0)


def test_a_body_that_lies_in_a_blob_survives_a_retry_and_a_move(
    spade: Spade, toy: Toy, server: str, tmp_path: Path
) -> None:
    large = msgspec.structs.replace(play(1), source="#" * 2_000_000)
    toy.publish(large)

    async def take(bus: NatsBus, reason: str = "") -> Message:
        async with bus.consume("agent", limit=1) as work:
            delivery = await anext(work)
            await (delivery.term(reason) if reason else delivery.ack())
            return delivery.message

    toy.do(lambda bus: take(bus, "too much"))
    (shown,) = spade("dlq", "show", "1", "--json").records
    assert shown["message"]["body"]["blob_bytes"] > 2_000_000
    assert spade("dlq", "retry", "1").returncode == 0
    other = make(server, tmp_path / "runs", f"{toy.run}-copy")
    moved = spade(
        "replay",
        "TASK",
        "--run",
        toy.run,
        "--into",
        server,
        "--into-run",
        other.run,
        "--into-token",
        TOKEN,
        "--yes",
    )
    assert "1 messages" in moved.stdout
    assert toy.do(take) == large
    assert other.do(take) == large


def test_what_cannot_be_tried_again_stays(spade: Spade, toy: Toy) -> None:
    toy.publish(letter(1), letter(2, "x (cut from 9000000 bytes)"))
    toy.inject("DLQ", "dlq.task", b"no letter", "junk")
    result = spade("dlq", "retry", "--all")
    assert "1 letters were published again." in result.stdout
    refused(result, "Letter 2 cannot be tried again", "too long", "letter 3", "cannot be read", code=1)
    assert len(toy.stored("DLQ")) == 2
    assert len(toy.stored("TASK")) == 1


def test_a_letter_does_not_push_out_what_took_its_place(spade: Spade, toy: Toy) -> None:
    old = codec.encode(failed("old"), run="toy", role="designer", instance="d", ts=1)
    tail = "design.0.d1-0"
    toy.inject("DESIGN", tail, old, "one")
    toy.publish(letter(1, source="DESIGN", subject=tail, frame=old))
    toy.inject("DESIGN", tail, old, "two")
    refused(spade("dlq", "retry", "1"), "message 2 took its place", code=1)
    assert [key for _, key, _ in toy.stored("DESIGN")] == ["two"]


def test_letters_are_dropped_after_a_question(
    spade: Spade, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.publish(letter(1), letter(2), letter(3))
    refused(spade("dlq", "drop", "1"), "asks first", "--yes", code=2)
    assert "1 letters were dropped." in spade("dlq", "drop", "1", "--yes").stdout
    refused(spade("dlq", "drop", "1", "--yes"), "no dead letter 1", code=1)
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda text: asked.append(text))
    assert "0 letters were dropped." in spade("dlq", "drop", "--all").stdout
    assert asked == [f"Drop 2 letters of run {toy.run} for good?"]
    assert len(toy.stored("DLQ")) == 2
    assert "2 letters were dropped." in spade("dlq", "drop", "--all", "--yes").stdout
    assert toy.stored("DLQ") == []


# a run that rests


def test_a_run_that_rests_is_looked_into_with_a_server_of_its_own(
    spade: Spade, rested: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ("--directory", str(rested.directory.root.parent))
    assert [one["kind"] for one in spade("replay", "EVENT", "--json", *where).records] == [
        "policy_published.v1",
        "environment_ready.v1",
        "episode_finished.v1",
    ]
    assert "1 dead letters" in spade("dlq", "list", *where).stdout
    assert "episode=e1" in spade("tail", *where).stdout
    (top,) = spade("top", "--once", "--json", "--interval", "0.1", *where).records
    assert (top["live"], top["dead_letters"]) == (False, 1)
    assert servers_of(rested.directory.bus) == []


def servers_of(directory: Path) -> list[int]:
    """Servers that still run on the store in ``directory``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(directory).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.slow
def test_two_may_look_into_a_run_that_rests(rested: Toy) -> None:
    command = [sys.executable, "-m", "engine.cli", "bus", "tail", "--run", str(rested.directory.root)]
    with subprocess.Popen([*command, "--follow"], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        first.stdout.readline()
        second = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert (second.returncode, second.stderr) == (0, "")
        assert len(second.stdout.splitlines()) == 3
        first.send_signal(signal.SIGINT)
        assert first.wait(10) == 0
    assert servers_of(rested.directory.bus) == []


# errors


def test_a_run_that_is_not_there_is_refused(spade: Spade, toy: Toy) -> None:
    refused(spade("tail", "--run", "nosuch"), "no run nosuch", toy.run, code=2)


def test_a_run_without_a_bus_is_refused(spade: Spade, tmp_path: Path) -> None:
    directory = RunDirectory.of(config(tmp_path / "runs"))
    directory.root.mkdir(parents=True)
    directory.database.touch()
    refused(spade("tail"), "toy has no bus", "--connect", code=2)
    with directory.locked():
        refused(spade("top", "--once"), "toy has no bus yet", code=2)
    assert not directory.bus.exists()


def test_a_server_that_is_away_is_told(spade: Spade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.busview.place.CONNECT_SECONDS", 0.3)
    directory = RunDirectory.of(config(tmp_path / "runs"))
    with directory.locked():
        directory.database.touch()
        (directory.root / "bus.json").write_bytes(
            msgspec.json.encode(Address("nats://127.0.0.1:1", "", "toy"))
        )
        refused(spade("tail"), "The bus of run toy at nats://127.0.0.1:1 does not answer", code=1)
    refused(spade("tail", "--connect", "nats://127.0.0.1:1", "--run", "toy"), "does not answer", code=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tail", "--stream", "NOSUCH"), "Streams: TASK, EVENT"),
        (("replay", "NOSUCH"), "Streams: TASK, EVENT"),
        (("tail", "nosuch.>"), "no stream holds"),
        (("replay", "EVENT", "--since", "soon"), "is not a duration"),
        (("replay", "EVENT", "--republish", "--into", "nats://x:1"), "exclude"),
        (("dlq", "retry"), "--all"),
        (("dlq", "retry", "1", "--all"), "--all"),
        (("tail", "--connect", "http://x"), "not the URL of a bus"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(spade: Spade, arguments: tuple[str, ...], said: str) -> None:
    refused(spade(*arguments), said, code=2)


def test_a_url_and_a_run_are_enough(spade: Spade, toy: Toy, server: str) -> None:
    toy.publish(finished("e1"))
    there = ("--connect", server, "--token", TOKEN)
    assert len(spade("tail", *there, "--run", toy.run).stdout.splitlines()) == 1
    assert len(spade("tail", *there).stdout.splitlines()) == 1
    refused(spade("tail", *there, "--run", "nosuch"), "knows no run nosuch", code=2)
    refused(
        spade("tail", "--connect", server, "--token", "wrong", "--run", toy.run), "refused the token", code=1
    )
