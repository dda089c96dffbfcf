"""``spade bus provision``: files, streams, and what it says when it cannot."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest
from scenes.brokers import broker
from scenes.small_run import config
from typer.testing import CliRunner, Result

from bus import BusError, connect, provision
from bus.messages import Heartbeat
from engine.cli import app
from engine.errors import ConfigError
from engine.running.role_host import Origin, put_origin


def spade(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bus", "provision", *arguments])


def test_keys_and_allow_lists(tmp_path: Path) -> None:
    result = spade("--run", "r", "-D", str(tmp_path), "--role", "judge")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "seeds").iterdir()} >= {"agent.seed", "judge.seed"}
    assert str(tmp_path / "account.conf") in result.output


def test_streams_on_a_broker_that_runs_and_again(tmp_path: Path) -> None:
    with broker(tmp_path, "r", tls=True, roles=("judge",)) as running:
        options = ("--streams-only", "--store-gb", "1", "--role", "judge", "--ca", str(running.ca))
        for _ in range(2):
            result = spade("--run", "r", "-D", str(tmp_path), "--url", running.url, *options)
            assert result.exit_code == 0, result.output
        assert "are ready" in result.output

        async def look() -> list[str]:
            async with connect(
                running.url, run="r", role="supervisor", instance="s", **running.login()
            ) as bus:
                return list((await bus.connection.api("CONSUMER.NAMES.TASK_r"))["consumers"])

        assert sorted(anyio.run(look)) == ["agent", "designer", "judge"]


@pytest.mark.slow
async def test_a_role_in_a_process_of_its_own_logs_in_with_its_key(tmp_path: Path) -> None:
    recipe = config(tmp_path)
    run = recipe.run.name
    with broker(tmp_path / "broker", run, tls=True) as running:
        await provision(running.url, run=run, store_gb=1, **running.login())
        async with connect(running.url, run=run, role="supervisor", instance="s", **running.login()) as bus:
            await put_origin(bus, Origin(recipe, "elsewhere", str(tmp_path)))
            async with bus.listen("hb.scorer.*") as beats:
                command = [sys.executable, "-m", "engine.cli", "role", "scorer", "--connect", running.url]
                known = {"SPADE_BUS_CREDENTIALS": str(running.seed().parent), "SPADE_BUS_CA": str(running.ca)}
                role = await anyio.open_process(
                    [*command, "--directory", str(tmp_path / "scorer")],
                    env={**os.environ, **known},
                    stdout=None,
                    stderr=None,
                )
                try:
                    with anyio.fail_after(30):
                        assert isinstance(await anext(beats), Heartbeat)
                        role.terminate()
                        assert await role.wait() == 0
                finally:
                    if role.returncode is None:
                        role.kill()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--run", "r"), "nothing to do"),
        (("--run", "r", "--streams-only", "-D", "{}"), "nothing to do"),
        (("--run", "r", "--url", "broker.example"), "not the URL"),
        (("--run", "r", "-D", "{}", "--role", "My Judge"), "cannot be part of a subject"),
        (("--run", "Bad Run", "-D", "{}"), ""),
    ],
)
def test_bad_input_is_refused_with_a_remedy(
    tmp_path: Path, arguments: tuple[str, ...], complaint: str
) -> None:
    result = spade(*(one.format(tmp_path / "d") for one in arguments))
    assert isinstance(result.exception, ConfigError)
    assert complaint in str(result.exception)
    assert result.exception.remedy
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "arguments",
    [("--max-payload-mb", "0"), ("--max-payload-mb", "65"), ("--store-gb", "-1"), ("--replicas", "0")],
)
def test_figures_have_bounds(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = spade("--run", "r", "-D", str(tmp_path / "d"), *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output
    assert not (tmp_path / "d").exists()


def test_streams_without_keys_ask_for_them(tmp_path: Path) -> None:
    result = spade("--run", "r", "-D", str(tmp_path), "--streams-only", "--url", "nats://127.0.0.1:1")
    assert isinstance(result.exception, BusError)
    assert "no key of role supervisor" in str(result.exception)
