"""The command ``spade``: its results, and one paragraph for every error."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from scenes.cli import Spade, refused
from scenes.small_run import batch, config, evaluation, events, finished, policy, ready, scored, serving

from engine import recipe
from engine.config import BusConfig, Config, ModelConfig
from engine.records import history, status
from engine.run import RunDirectory
from engine.running import run_command

HEAVY = ("torch", "vllm", "transformers", "trl", "plotly", "scipy", "nats", "aiohttp", "numpy")


def write(tmp_path: Path, toy: Config) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text(recipe.dump(toy))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that passes for a model."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"\0" * 4000)
    return path


@pytest.fixture
def finished_run(tmp_path: Path) -> Iterator[RunDirectory]:
    toy = config(tmp_path / "runs")
    run = RunDirectory.of(toy)
    with run.locked():
        run.adopt(toy)
    connection = history.create(run.database)
    messages = [policy(0), ready("d1"), finished("e1"), scored("d1"), policy(1), batch(0, 1), serving(1)]
    history.apply(
        connection, events([*messages, evaluation(1), policy(2), batch(1, 2, final=True), serving(2)])
    )
    history.put_note(connection, "ended", {"at": 1.0, "complete": True, "serving": [2]})
    connection.close()
    return run


def test_the_command_imports_nothing_heavy() -> None:
    code = f"import sys, engine.cli, engine.views.overview; print({{*{HEAVY!r}}} & {{*sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_status_is_quick_and_complete(finished_run: RunDirectory, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.cli", "status", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    state = json.loads(result.stdout)
    assert state["state"] == "complete"
    assert state["step"] == state["version_published"] == 2
    assert state["versions_serving"] == [2]
    wanted = {
        "episodes_finished": 1,
        "environments_accepted": 1,
        "designs_rejected": 0,
        "agent_samples_trained": 4,
        "designer_samples_trained": 2,
        "max_staleness_seen": 1,
        "episodes_failed": {"infra": 0, "quarantined": 0},
    }
    assert {key: state[key] for key in wanted} == wanted


def test_status_reads_a_run_named_by_an_argument_or_an_option(
    spade: Spade, finished_run: RunDirectory
) -> None:
    for name in ((), ("toy",), ("-r", "toy")):
        result = spade("status", *name)
        assert result.returncode == 0
        assert "toy (complete)" in result.stdout
        assert "held-out mid" in result.stdout
    assert 'spade_step{run="toy"} 2' in spade("status", "--metrics").stdout.splitlines()


def test_a_check_fails_for_a_run_that_stopped(spade: Spade, finished_run: RunDirectory) -> None:
    assert spade("status", "--check").returncode == 0
    connection = history.create(finished_run.database)
    history.put_note(connection, "ended", {"at": 1.0, "complete": False, "serving": [2]})
    connection.close()
    assert spade("status", "--check").returncode == 1


def test_the_version_is_printed(spade: Spade) -> None:
    assert re.fullmatch(r"spade \d+\.\d+.*\n", spade("--version").stdout)


def test_help_lists_every_command(spade: Spade) -> None:
    text = spade("--help").stdout
    for command in ("run", "status", "report", "role", "warmstart", "envs", "bus", "bench", "export"):
        assert f" {command} " in text


def test_status_without_a_run_says_how_to_start_one(spade: Spade, tmp_path: Path) -> None:
    refused(spade("status"), "There is no run in runs", "spade run")


def test_a_report_is_written_on_demand(spade: Spade, finished_run: RunDirectory, tmp_path: Path) -> None:
    result = spade("report", "toy")
    assert Path(result.stdout.strip()) == finished_run.report
    assert "Counting d1" in finished_run.report.read_text()


def test_a_complete_run_is_not_run_again(spade: Spade, finished_run: RunDirectory, tmp_path: Path) -> None:
    result = spade("run", str(finished_run.config_file))
    assert result.returncode == 0
    assert "is complete" in result.stdout


def test_a_complete_run_goes_on_with_more_steps(finished_run: RunDirectory) -> None:
    toy = finished_run.config()
    assert run_command.is_complete(finished_run, toy)
    longer = msgspec.structs.replace(toy, run=msgspec.structs.replace(toy.run, steps=2))
    assert not run_command.is_complete(finished_run, longer)
    connection = history.create(finished_run.database)
    history.apply(connection, events([policy(3), batch(2, 3)], start=100))
    after = status.read(connection)
    connection.close()
    assert (after.rounds, after.final) == (2, False)
    assert not status.complete(after, (), steps=2, servers=False)


def test_a_dry_run_prints_the_plan_and_starts_nothing(spade: Spade, tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, config(tmp_path / "runs"))
    result = spade("run", str(path), "--dry-run", "--steps", "7", f"model.path={model}", "memory=off")
    assert result.returncode == 0, result.stderr
    for part in ("nats-server", "vllm.entrypoints", "role learner --connect", "steps = 7", "port free", "GB"):
        assert part in result.stdout
    assert "  memory       off\n" in result.stdout
    assert "memory = false" in result.stdout
    assert not (tmp_path / "runs").exists()


def test_a_busy_port_is_one_paragraph(spade: Spade, tmp_path: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        toy = msgspec.structs.replace(config(tmp_path / "runs"), bus=BusConfig(port=port))
        result = spade("run", str(write(tmp_path, toy)), f"model.path={model}")
    refused(result, f"bus.port = {port}", "taken", "bus.port=0")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["learner.optimiser.learning_rate=1"], ["Did you mean learner.optimizer"]),
        (["model.path=nowhere"], ["nowhere", "not a directory"]),
        # a file system without free space
        (["run.directory=/proc/self"], ["cannot be created", "run.directory=PATH"]),
        (["run.roles=juggler"], ["juggler", "agent, designer"]),
        (["--dry-run", "learner.launch=nosuch"], ["nosuch"]),
        (["--dry-run", "designer.corpus=dir:nosuch"], ["nosuch"]),
        (["--dry-run", "model.path=package:nosuch"], ["nosuch"]),
        (
            ["--dry-run", "designer.corpus=jsonl:empty.jsonl"],
            ["has no document", "empty.jsonl, line 1", "corpus=off"],
        ),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_in_one_paragraph(
    spade: Spade, tmp_path: Path, model: Path, settings: list[str], parts: list[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("no object\n")
    path = write(tmp_path, config(tmp_path / "runs", model=ModelConfig(path=str(model))))
    refused(spade("run", str(path), *settings), *parts)


def test_a_recipe_that_is_missing_is_refused_in_one_paragraph(spade: Spade) -> None:
    refused(spade("run", "nano.toml"), "nano.toml cannot be read", "no recipe")


def test_a_run_that_is_held_names_its_holder(spade: Spade, tmp_path: Path, model: Path) -> None:
    toy = config(tmp_path / "runs")
    with RunDirectory.of(toy).locked():
        result = spade("run", str(write(tmp_path, toy)), f"model.path={model}")
    refused(result, f"process {os.getpid()} on", "already running", code=1)


@pytest.mark.slow
def test_a_signal_while_the_model_is_prepared_ends_cleanly(tmp_path: Path, model: Path) -> None:
    """The signal comes before the supervisor is there, and a second one while it drains."""
    toy = config(tmp_path / "runs")
    path = write(tmp_path, toy)
    command = [sys.executable, "-m", "engine.cli", "run", str(path), f"model.path={model}"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert "Starting toy" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert any("Stopping" in line for line in iter(process.stdout.readline, ""))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=40) == 0
        assert "The same command goes on" in process.stdout.read()
    assert not [child for child in psutil.process_iter() if child.ppid() == process.pid]
    assert RunDirectory.of(toy).holder() is None


@pytest.mark.parametrize("url", ["", "host", "http://127.0.0.1:1", "nats://127.0.0.1:port"])
def test_a_role_is_not_started_on_what_is_no_bus(spade: Spade, url: str) -> None:
    refused(spade("role", "agent", "--connect", url), "--connect", "nats://")


def test_a_role_that_is_not_there_is_refused_before_a_bus_is_sought(spade: Spade) -> None:
    refused(spade("role", "nosuch", "--connect", "nats://127.0.0.1:1"), "nosuch", "designer")


def test_a_dry_run_tells_what_a_resume_would_refuse(spade: Spade, tmp_path: Path, model: Path) -> None:
    path = write(tmp_path, config(tmp_path, model=ModelConfig(path=str(model))))
    RunDirectory.of(recipe.load(path).config).root.mkdir(parents=True)
    RunDirectory.of(recipe.load(path).config).adopt(recipe.load(path).config)
    result = spade("run", str(path), "--dry-run", "run.seed=99")
    refused(result, "run.seed was", "is 99")


def test_a_damaged_database_is_one_paragraph(spade: Spade, tmp_path: Path) -> None:
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "run.db").write_text("no database")
    refused(spade("status", "bad"), "damaged", code=1)


def test_runs_are_listed_with_their_rounds(spade: Spade, finished_run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.db").write_bytes(b"not a database")
    lines = spade("ls").stdout.splitlines()
    assert lines[0].split() == ["run", "state", "rounds", "last", "event"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert "complete" in rows["toy"]
    assert "1 of 1 and the final batch" in rows["toy"]
    assert "unreadable" in rows["broken"]


def test_logs_are_listed_and_their_last_lines_printed(spade: Spade, finished_run: RunDirectory) -> None:
    finished_run.logs.mkdir(exist_ok=True)
    (finished_run.logs / "learner.out").write_text("".join(f"line {number}\x1b[2J\n" for number in range(90)))
    log = finished_run.logs / "learner.out"
    assert spade("logs").stdout.split() == [f"{log.stat().st_size:,}", str(log)]
    shown = spade("logs", "toy", "learner.out", "-n", "2").stdout
    assert shown == "line 88\ufffd[2J\nline 89\ufffd[2J\n"
    refused(spade("logs", "toy", "nope"), "no log 'nope'", "learner.out")


def test_only_a_run_that_runs_here_is_stopped(spade: Spade, finished_run: RunDirectory) -> None:
    refused(spade("stop", "toy"), "is not running", code=1)
    with finished_run.locked():
        holder = finished_run.holder()
        assert holder is not None
        finished_run.lock_file.write_text(json.dumps(holder | {"host": "elsewhere"}))
        refused(spade("stop", "toy"), "runs on elsewhere", "on that host", code=1)
