"""Logs are JSON lines; libraries' logs land beside ours; warnings reach whoever watches."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import telemetry


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    telemetry.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_json_lines_with_process_and_time(tmp_path: Path) -> None:
    log = telemetry.configure(tmp_path, "supervisor")
    log.info("run.started", steps=3, path=Path("x"))
    logging.getLogger("nats").warning("slow %s", "consumer")
    first, second = lines(tmp_path / "supervisor.jsonl")
    assert (first["event"], first["steps"], first["path"]) == ("run.started", 3, "x")
    assert (first["process"], first["level"]) == ("supervisor", "info")
    assert first["timestamp"].endswith("Z")
    assert (second["event"], second["level"]) == ("slow consumer", "warning")


def test_exceptions_are_structured(tmp_path: Path) -> None:
    log = telemetry.configure(tmp_path, "supervisor")
    try:
        raise ValueError("three")
    except ValueError as error:
        log.error("run.failed", exc_info=error)
    assert lines(tmp_path / "supervisor.jsonl")[0]["exception"][0]["exc_value"] == "three"


def test_warnings_go_to_the_sink_and_information_does_not(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    log = telemetry.configure(tmp_path, "s", sink=lambda level, event: seen.append((level, event["event"])))
    log.info("quiet")
    log.warning("loud", role="agent")
    logging.getLogger("library").error("broken")
    assert seen == [("warning", "loud"), ("error", "broken")]


def test_configuring_again_replaces_the_destination(tmp_path: Path) -> None:
    telemetry.configure(tmp_path / "a", "s")
    telemetry.configure(tmp_path / "b", "s").info("here")
    assert lines(tmp_path / "a" / "s.jsonl") == []
    assert len(lines(tmp_path / "b" / "s.jsonl")) == 1
