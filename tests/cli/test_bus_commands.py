"""``spade bus``: looking into the streams of a run in progress, and of one at rest."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest
from rich.console import Console
from scenes.brokers import TOKEN, plain_server
from scenes.brokers import broker as secured
from scenes.cli import Spade, refused
from scenes.small_run import config, failed, finished, policy, ready, request

from bus import Bus, codec, connect, provision
from bus.messages import DeadLetter, Message
from bus.publisher import Outgoing
from engine.busview import depths, stored
from engine.config import RunConfig
from engine.run import RunDirectory
from engine.running.supervisor import Address


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with plain_server(tmp_path_factory.mktemp("broker")) as url:
        yield url


class Toy:
    """A run whose bus is the module's server."""

    def __init__(self, url: str, directory: RunDirectory) -> None:
        self.url, self.directory, self.run = url, directory, directory.root.name

    @asynccontextmanager
    async def bus(self, role: str = "agent") -> AsyncIterator[Bus]:
        async with connect(self.url, run=self.run, role=role, instance=f"{role}-0", token=TOKEN) as bus:
            yield bus

    def do(self, work: Callable[[Bus], Awaitable[Any]]) -> Any:
        """Run ``work`` with a client of the run."""

        async def with_bus() -> Any:
            async with self.bus() as bus:
                return await work(bus)

        return anyio.run(with_bus)

    def publish(self, *messages: Message) -> None:
        self.do(lambda bus: bus.publish_all(messages))

    def inject(self, stream: str, tail: str, frame: bytes, key: str) -> None:
        """Store bytes as they are."""

        def send(bus: Bus) -> Awaitable[int]:
            place = bus.names.stream(stream), bus.names.subject(tail)
            return bus.publisher.send(Outgoing(*place, frame, key))

        self.do(send)

    def stored(self, stream: str) -> list[tuple[str, str, bytes]]:
        """Return (tail, id, bytes) of all messages."""

        async def read(bus: Bus) -> list[tuple[str, str, bytes]]:
            info = await bus.stream_info(stream)
            found = stored.between(bus, stored.StreamSelection(stream), info.first, info.last)
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


async def remove(bus: Bus) -> None:
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


def letter(number: int, reason: str = "delivered too often", **given: Any) -> DeadLetter:
    work = request(number)
    frame = codec.encode(work, run="toy", role="scorer", instance="scorer-0")
    values = {"source": "TASK", "sequence": number, "subject": work.tail, "attempts": 9, "frame": frame}
    return DeadLetter(**(values | {"reason": reason} | given))


# top


def test_top_shows_depths_limits_and_rates(spade: Spade, toy: Toy) -> None:
    toy.publish(*(request(number) for number in range(4)), letter(9), finished("e1"))
    (top,) = spade("bus", "top", "--once", "--json", "--interval", "0.1").records
    assert top["run"] == toy.run
    streams = top["streams"]
    assert (streams["TASK"]["messages"], streams["DLQ"]["messages"]) == (4, 1)
    assert 0 < streams["TASK"]["share"] < 0.1
    assert streams["EVENT"]["per_s"] == 0.0
    assert 0 <= streams["EVENT"]["newest_age_s"] < 60
    agent = top["consumers"]["TASK agent"]
    assert (agent["pending"], agent["unacknowledged"], agent["redelivered"]) == (4, 0, 0)
    table = spade("bus", "top", "--once", "--interval", "0.1").stdout
    for part in (f"run {toy.run}", "EVENT", "TASK designer"):
        assert part in table
    narrow = Console(width=60)
    with narrow.capture() as shown:
        narrow.print(depths.table(top))
    assert "…" not in shown.get()


# tail


def test_tail_shows_the_last_messages(spade: Spade, toy: Toy) -> None:
    toy.publish(policy(0), *(finished(f"e{number}") for number in range(30)), failed("x"))
    lines = spade("bus", "tail").stdout.splitlines()
    assert len(lines) == 20
    assert "EVENT 32  agent/agent-0  episode_failed.v1  episode=x" in lines[-1]
    assert len(spade("bus", "tail", "-n", "100").stdout.splitlines()) == 32


def test_tail_finds_a_rare_kind_far_back(spade: Spade, toy: Toy) -> None:
    toy.publish(failed("x"), policy(0), *(finished(f"e{number}") for number in range(2000)))
    (line,) = spade("bus", "tail", "--kind", "policy_published").stdout.splitlines()
    assert "policy_published.v1  version=0  step=0" in line
    (found,) = spade("bus", "tail", "event.agent.failed", "--json").records
    assert (found["kind"], found["body"]["episode"], found["error"]) == ("episode_failed.v1", "x", None)
    nothing = spade("bus", "tail", "--kind", "server_lost")
    assert (nothing.stdout, nothing.stderr) == ("", "No message of stream EVENT matches.\n")


def test_tail_shows_what_cannot_be_decoded(spade: Spade, toy: Toy) -> None:
    toy.publish(finished("e1"))
    toy.inject("EVENT", "event.agent.finished", b"\xc1 no frame", "junk")
    good, bad = spade("bus", "tail", "--json").records
    assert good["body"]["sample"] == "sample-e1"
    assert (bad["kind"], bad["body"], bad["size"]) == ("", None, 10)
    assert "no frame" in bad["error"]
    assert "UNREADABLE" in spade("bus", "tail").stdout
    assert spade("bus", "dlq", "list").stdout == "0 dead letters\n"


@pytest.mark.slow
def test_tail_follows_until_a_signal(toy: Toy) -> None:
    toy.publish(finished("e0"))
    command = [sys.executable, "-m", "engine.cli", "bus", "tail", "--follow", "-r", str(toy.directory.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert "episode=e0" in process.stdout.readline()
        toy.publish(finished("e1"), finished("e2"))
        assert "episode=e1" in process.stdout.readline()
        assert "episode=e2" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_reader_of_the_output_that_goes_away_ends_it_quietly(toy: Toy) -> None:
    toy.publish(*(finished(f"e{number}") for number in range(2000)))
    command = f"{sys.executable} -m engine.cli bus tail --json -n 2000 -r {toy.directory.root} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["sequence"] == 1


@pytest.mark.slow
def test_the_supervisors_key_opens_everything(spade: Spade, tmp_path: Path) -> None:
    with secured(tmp_path / "broker", "keyed", tls=True) as running:
        url, keys, ca = running.url, running.seed().parent, str(running.ca)

        async def prepare() -> None:
            await provision(url, run="keyed", store_gb=0.25, **running.login())
            login = running.login("agent")
            async with connect(url, run="keyed", role="agent", instance="agent-0", **login) as bus:
                await bus.publish_all([finished("e1"), letter(1)])

        anyio.run(prepare)
        there = ("--connect", url, "--run", "keyed", "--ca", ca, "--credentials", str(keys))
        assert spade("bus", "top", "--once", "--interval", "0.1", *there).returncode == 0
        assert len(spade("bus", "tail", *there).stdout.splitlines()) == 1
        assert spade("bus", "dlq", "replay", "1", *there).returncode == 0
        assert len(spade("bus", "tail", "--stream", "TASK", *there).stdout.splitlines()) == 1
        refused(spade("bus", "tail", *there[:-1], str(tmp_path)), "no key of role supervisor", code=1)


# dead letters


def test_letters_are_listed_by_reason(spade: Spade, toy: Toy) -> None:
    toy.publish(letter(1), letter(2), letter(3, "an agent cannot answer 7"))
    toy.inject("DLQ", "dlq.task", b"no letter", "junk")
    lines = spade("bus", "dlq", "list", "-n", "1").stdout.splitlines()
    assert lines[0] == "4 dead letters"
    assert lines[1].split() == ["2", "TASK", "episode_request.v1", "delivered", "too", "often"]
    assert "no frame" in lines[-1]
    records = spade("bus", "dlq", "list", "--json").records
    assert [(one["number"], one["source"], one["sequence"]) for one in records[:2]] == [
        (1, "TASK", 1),
        (2, "TASK", 2),
    ]
    assert records[3]["damaged"].startswith("no frame")


def test_a_letter_is_shown_with_its_message(spade: Spade, toy: Toy) -> None:
    toy.publish(letter(1))
    toy.inject("DLQ", "dlq.task", b"no letter", "junk")
    (shown,) = spade("bus", "dlq", "show", "1", "--json").records
    assert (shown["reason"], shown["obstacle"]) == ("delivered too often", None)
    assert shown["message"]["body"]["episode"] == "e1"
    assert '"episode": "e1"' in spade("bus", "dlq", "show", "1").stdout
    assert "cannot be read" in spade("bus", "dlq", "show", "2").stdout
    refused(spade("bus", "dlq", "show", "9"), "no dead letter 9", "spade bus dlq list", code=2)


def test_a_replay_brings_the_message_back_once(spade: Spade, toy: Toy) -> None:
    toy.publish(request(1))
    ((_, _, frame),) = toy.stored("TASK")

    async def give_up(bus: Bus) -> None:
        async with bus.consume("agent", limit=1) as work:
            await (await anext(work)).term("a bad day")

    toy.do(give_up)
    assert toy.stored("TASK") == []
    assert "1 letters were published again." in spade("bus", "dlq", "replay", "1").stdout
    assert [(tail, data) for tail, _, data in toy.stored("TASK")] == [(request(1).tail, frame)]
    assert toy.stored("DLQ") == []
    refused(spade("bus", "dlq", "replay", "1"), "no dead letter 1", code=2)
    assert len(toy.stored("TASK")) == 1


def test_a_replay_that_was_interrupted_stores_the_message_once(spade: Spade, toy: Toy) -> None:
    toy.publish(letter(1))
    frame = letter(1).frame
    toy.inject(
        "TASK", request(1).tail, frame, "retry:TASK:1"
    )  # published; killed before the letter was removed
    assert "1 letters were published again." in spade("bus", "dlq", "replay", "--all").stdout
    assert (len(toy.stored("TASK")), len(toy.stored("DLQ"))) == (1, 0)


def test_a_letter_that_cannot_be_replayed_stays(spade: Spade, toy: Toy) -> None:
    toy.publish(letter(1), letter(2, "x (cut from 9000000 bytes)"))
    toy.inject("DLQ", "dlq.task", b"no letter", "junk")
    result = spade("bus", "dlq", "replay", "--all")
    assert "1 letters were published again." in result.stdout
    refused(result, "Letter 2 cannot be replayed", "too long", "letter 3", "cannot be read", code=1)
    assert (len(toy.stored("DLQ")), len(toy.stored("TASK"))) == (2, 1)


def test_a_run_at_rest_is_served_for_the_command_alone(spade: Spade, rested: Toy) -> None:
    where = ("--directory", str(rested.directory.root.parent))
    assert [one["kind"] for one in spade("bus", "tail", "--json", *where).records] == [
        "policy_published.v1",
        "environment_ready.v1",
        "episode_finished.v1",
    ]
    assert "1 dead letters" in spade("bus", "dlq", "list", *where).stdout
    (top,) = spade("bus", "top", "--once", "--json", "--interval", "0.1", *where).records
    assert top["streams"]["DLQ"]["messages"] == 1
    store = str(rested.directory.bus)
    assert not [one for one in psutil.process_iter(["cmdline"]) if store in str(one.info["cmdline"])]


# errors


def test_a_run_that_does_not_exist_is_refused(spade: Spade, toy: Toy) -> None:
    refused(spade("bus", "tail", "--run", "nosuch"), "no run nosuch", toy.run, code=2)


def test_a_run_without_a_bus_is_refused(spade: Spade, tmp_path: Path) -> None:
    directory = RunDirectory.of(config(tmp_path / "runs"))
    directory.root.mkdir(parents=True)
    directory.database.touch()
    refused(spade("bus", "tail"), "toy has no bus", "--connect", code=2)
    with directory.locked():
        refused(spade("bus", "top", "--once"), "toy has no bus yet", code=2)
    assert not directory.bus.exists()


def test_a_broker_that_does_not_answer_is_reported(
    spade: Spade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.busview.attach._CONNECT_SECONDS", 0.3)
    there = ("--connect", "nats://127.0.0.1:1", "--run", "toy")
    refused(spade("bus", "tail", *there), "at nats://127.0.0.1:1 does not answer", code=1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("tail", "--stream", "NOSUCH"), "Streams: TASK, EVENT"),
        (("tail", "--kind", "nosuch"), "Kinds: "),
        (("tail", "nosuch.>"), "no stream holds"),
        (("tail", "--connect", "http://x"), "not the URL of a bus"),
        (("dlq", "replay"), "--all"),
        (("dlq", "replay", "1", "--all"), "--all"),
    ],
)
def test_bad_input_is_refused(spade: Spade, toy: Toy, arguments: tuple[str, ...], complaint: str) -> None:
    refused(spade("bus", *arguments), complaint, code=2)


def test_a_url_and_a_run_are_enough(spade: Spade, toy: Toy, server: str) -> None:
    toy.publish(finished("e1"))
    there = ("bus", "tail", "--connect", server, "--token", TOKEN)
    assert len(spade(*there, "--run", toy.run).stdout.splitlines()) == 1
    assert len(spade(*there).stdout.splitlines()) == 1
    refused(spade(*there, "--run", "nosuch"), "has no run nosuch", code=2)
    refused(spade(*there[:-1], "wrong", "--run", toy.run), "refused the token", code=1)
