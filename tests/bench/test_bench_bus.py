"""``spade bench bus`` at tiny sizes: every key is there, nothing is lost, what is absent is said."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from rich.console import Console

from engine.bench import bus as bench
from engine.bench import bus_cases, bus_load, bus_peers, bus_table
from engine.bench.bus_job import Job, Outcome
from engine.bench.figures import quantile
from engine.errors import SpadeError

# More than sixty processes are started one after the other: slow where others are busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def command() -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "engine.cli", "bench", "bus", "--json"]
    line += ["--seconds", "0.05", "--repeat", "1", "--no-pin"]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=590)


@pytest.fixture
def result(command: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert command.returncode == 0, command.stderr
    found: dict[str, Any] = json.loads(command.stdout)
    return found


def test_the_figures_asked_for_are_there(result: dict[str, Any]) -> None:
    for key in (
        "acked_1k_per_s",
        "acked_36k_mb_per_s",
        "publish_ack_p50_ms",
        "publish_ack_p99_ms",
        "age_p99_ms_at_500",
    ):
        assert result[key] > 0, key
    assert result["publish_ack_p50_ms"] <= result["publish_ack_p99_ms"]
    assert {name.partition("_")[0] for name in result["ceiling"]} == {"memcpy", "tcp", "raw", "fsync"}
    assert all(0 < share < 1 for share in result["efficiency"].values())
    assert set(result["paths"]) == {"sample", "work", "sample_always"}
    assert result["server"]["version"].startswith("2.")
    assert len(result["server"]["config_hash"]) == 12
    for name in ("ack_ms", "delivery_ms"):
        assert 0 < result["recovery"][name]["median"] < 10_000
    assert result["load"]["whole"]["seconds"] > 0
    assert result["headline"].startswith("sample stream")


def test_nothing_is_lost_or_counted_twice(result: dict[str, Any]) -> None:
    assert (result["lost"], result["duplicates"]) == (0, 0)


def test_transports_say_what_they_promise(result: dict[str, Any]) -> None:
    found = {**result["paths"], **result["peers"]}
    assert found["sample"]["durability"] == "<= 0.1 s at a power cut"
    assert found["sample_always"]["durability"] == "full"
    assert found["files_rename"]["durability"] == "process crash"


@pytest.mark.parametrize("transport", [*bus_cases.OURS, *bus_cases.PEERS], ids=lambda found: found.name)
def test_each_transport_that_is_installed_is_measured(
    result: dict[str, Any], transport: bus_cases.Transport
) -> None:
    found = {**result["paths"], **result["peers"]}[transport.name]
    absent = transport.absent()
    assert found.get("absent", "") == absent
    if absent:
        pytest.skip(absent)
    assert (found.get("lost", 0), found.get("duplicates", 0)) == (0, 0)
    figures = ["acked_1k_per_s", "acked_36k_mb_per_s"]
    figures += [*bus_cases.HUGE] if transport.huge else []
    figures += ["age_p99_ms_at_500"] if transport.kind != "memory" else []
    figures += ["accept_p99_ms"] if transport.accepts and transport.kind != "work" else []
    assert all(found[name]["median"] > 0 for name in figures)


@pytest.mark.parametrize(
    ("settings", "complaint", "remedy"),
    [
        (bench.Settings(paths=("work", "nope")), "no path nope of ours", "sample_always"),
        (bench.Settings(peers=("zmq", "nope")), "no peer nope to compare with", "redis_everysec_once"),
    ],
)
async def test_a_name_that_does_not_exist_is_an_error(
    settings: bench.Settings, complaint: str, remedy: str
) -> None:
    with pytest.raises(SpadeError, match=complaint) as caught:
        await bench.measure(settings)
    assert remedy in caught.value.remedy


def test_the_table_shows_every_transport(result: dict[str, Any]) -> None:
    report = msgspec.convert(result, bench.Report)
    console = Console(width=240, record=True, file=io.StringIO())
    bus_table.show(report, console)
    text = console.export_text()
    for word in ("work queue", "files_rename", "redis_always", "raw_1k_per_s", "Others used", "kill -9"):
        assert word in text


def test_redis_is_compared_by_promise_and_by_size() -> None:
    def measured(small: float, large: float) -> bench.Measured:
        figures = [bench.Figure(value, value, value, 1) for value in (small, large)]
        return bench.Measured(
            what="", durability="", acked_1k_per_s=figures[0], acked_36k_mb_per_s=figures[1]
        )

    redis = {"redis_everysec": measured(3, 1), "redis_everysec_once": measured(1, 1), "zmq": measured(9, 9)}
    assert bench._ahead(measured(2, 2), redis) == {
        "redis_everysec_1k": False,
        "redis_everysec_36k": True,
        "redis_everysec_once_1k": True,
        "redis_everysec_once_36k": True,
    }
    unmeasured = bench.Measured(what="", durability="", absent="not installed: redis-server")
    assert bench._ahead(measured(2, 2), {"redis_everysec": unmeasured}) == {}


def test_what_is_not_installed_is_absent() -> None:
    no_module = bus_cases.Transport("x", "zmq", "none", "x", needs=("no_module_of_this_name",))
    no_program = bus_cases.Transport("x", "redis", "none", "x", program="no-program-of-this-name")
    assert no_module.absent() == "not installed: Python module no_module_of_this_name"
    assert no_program.absent() == "not installed: no-program-of-this-name"


@pytest.mark.parametrize("ours", [True, False])
async def test_a_peer_that_fails_is_noted_and_one_of_our_paths_is_an_error(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = bench._Bench(bench.Settings(seconds=0.05), setups=_Broken(), say=lambda text: None)  # type: ignore[arg-type]
    transport = bus_cases.Transport("broken", "zmq", "none", "an address that is none", ours=ours)
    if ours:
        with pytest.raises(SpadeError, match="consume side of zmq"):
            await found.transport(transport)
        return
    await found.transport(transport)
    assert "consume side of zmq" in found.failed["broken"]
    monkeypatch.delattr(bench, "_side")
    await found.transport(transport)


class _Broken(bus_cases.Setups):
    """Gives every case an address at which nobody can listen."""

    def __init__(self) -> None:
        super().__init__({}, scratch=None)  # type: ignore[arg-type]

    def of(self, transport: bus_cases.Transport) -> Any:
        return self.address("tcp://no such address")

    def address(self, url: str) -> Any:
        from contextlib import nullcontext

        return nullcontext({"url": url})


def test_frames_have_the_size_asked_for() -> None:
    for size in (bus_cases.SMALL, bus_cases.LARGE):
        for work in (True, False):
            frame = bus_load.encode(bus_load.Supply(size, work=work).make())
            assert abs(len(frame) - size) < 32


def test_a_sink_counts_losses_and_duplicates() -> None:
    supply = bus_load.Supply(512, work=False)
    messages = [supply.make() for _ in range(4)] + [supply.make(last=True)]
    sink = bus_load.Sink(ages=True)
    for number in (0, 1, 1, 4):
        sink.take(*bus_peers.codec.decode(bus_load.encode(messages[number])))
    assert not sink.done
    outcome = sink.outcome()
    assert (outcome.messages, outcome.lost, outcome.duplicates) == (3, 2, 1)
    assert len(outcome.milliseconds) == 4
    for number in (2, 3):
        sink.take(*bus_peers.codec.decode(bus_load.encode(messages[number])))
    assert sink.done


def test_quantiles_are_of_the_nearest_rank() -> None:
    assert quantile([], 0.5) == 0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([float(number) for number in range(100)], 0.99) == 99.0


def test_jobs_and_outcomes_pass_between_processes() -> None:
    job = Job(transport="zmq", side="produce", size=8, seconds=0.1, where={"url": "x"}, cores=(0,))
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job
    outcome = Outcome(messages=3, milliseconds=[0.5])
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=Outcome) == outcome
