"""The role in docs/examples: a stranger to our code that our scorer takes for a designer."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import anyio
import pytest
from bus_trouble import RUN, served
from scenes.brokers import broker

from bus import connect, provision
from bus.access import ADMIN
from bus.messages import (
    DesignTicket,
    EnvironmentReady,
    EpisodeRequest,
    Message,
    PolicyPublished,
    ServerServing,
)
from engine import recipe
from engine.lineage import Version
from roles.scorer.curriculum import Curriculum
from roles.scorer.state import Publish
from sandbox import SandboxPool, SandboxSettings, Validator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "docs" / "examples" / "designer.py"
PROGRAMS = ROOT / "docs" / "examples" / "programs"
PAGE = ROOT / "docs" / "role-in-40-lines.md"
TOKEN_LOGIN, KEY_LOGIN = '"token": os.environ["SPADE_BUS_TOKEN"]', '"nkeys_seed": "designer.seed"'


def imported(source: str) -> set[str]:
    """Return the top-level packages a program imports, without the standard library."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names - sys.stdlib_module_names


def test_it_is_forty_lines_of_nats_and_msgpack() -> None:
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 40
    assert imported(source) == {"nats", "msgpack"}


def test_the_page_shows_it_as_it_is() -> None:
    page = PAGE.read_text()
    assert f"```python\n{EXAMPLE.read_text()}```" in page
    assert KEY_LOGIN in page
    assert TOKEN_LOGIN in EXAMPLE.read_text()


async def test_its_program_is_a_valid_environment() -> None:
    async with SandboxPool(SandboxSettings(zygotes=1)) as pool:
        for path in PROGRAMS.glob("*.py"):
            verdict = await Validator(pool).validate(path.read_text())
            assert (verdict.ok, verdict.rung) == (True, "accepted"), verdict.reason


@contextlib.contextmanager
def stranger(
    url: str, directory: Path, *, token: str = "", program: Path = EXAMPLE
) -> Iterator[Popen[bytes]]:
    """Run the example in a process and a directory of its own."""
    with (directory / "stranger.log").open("wb") as log:
        process = Popen(
            [sys.executable, "-I", str(program), url, RUN, str(PROGRAMS)],
            env={"SPADE_BUS_TOKEN": token},
            cwd=directory,
            stdout=log,
            stderr=log,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def ticket(number: int) -> DesignTicket:
    """Return a ticket."""
    return DesignTicket(
        design=f"d{number}", cohort=0, slot=number, skill="x", seed=1, attempts=1, target=0.5, round=0
    )


def curriculum() -> Curriculum:
    """Return the scorer's machine for the nano recipe."""
    return Curriculum(recipe.load(ROOT / "configs" / "nano.toml", [f"run.name={RUN}"]).config)


def first_facts() -> list[Message]:
    """Return the facts without which the scorer asks for nothing: weights exist and are served."""
    version = Version(1, 0).pack()
    return [
        PolicyPublished(
            version=version, step=0, uri="", sha256="", size=0, canary_tokens=b"", canary_logprobs=b""
        ),
        ServerServing(server="s-0", epoch="1", url="", version=version, canary_error=0.0, seconds=0.0),
    ]


async def test_the_scorer_issues_plays_of_what_it_designed(tmp_path: Path) -> None:
    """Tickets of the nano recipe's curriculum are answered, and the answers are played."""
    machine = curriculum()
    asked: set[str] = set()
    played: dict[str, str] = {}
    async with served(tmp_path / "bus", role="scorer") as (handle, bus):
        await bus.publish_all(first_facts())
        with stranger(handle.url, tmp_path, token=handle.token), anyio.fail_after(40):
            async with bus.follow("EVENT") as records:
                while not asked or not played:
                    record = await anext(records)
                    if isinstance(record.message, EnvironmentReady):
                        assert record.tail == record.message.tail
                        assert (record.envelope.run, record.envelope.role) == (RUN, "designer")
                    commands = machine.apply(record.sequence, record.message)
                    wanted = [command.message for command in commands if isinstance(command, Publish)]
                    await bus.publish_all(wanted)
                    asked |= {work.design for work in wanted if isinstance(work, DesignTicket)}
                    played |= {
                        work.design: work.environment for work in wanted if isinstance(work, EpisodeRequest)
                    }
        assert (await bus.stream_info("DLQ")).messages == 0
    assert set(played) <= asked
    written = {hashlib.sha256(path.read_bytes()).hexdigest() for path in PROGRAMS.glob("*.py")}
    assert set(played.values()) <= written


async def test_it_goes_on_when_its_server_died(tmp_path: Path) -> None:
    async with served(tmp_path / "bus", role="scorer") as (handle, bus):
        with stranger(handle.url, tmp_path, token=handle.token) as process, anyio.fail_after(40):
            async with bus.follow("EVENT") as records:
                await bus.publish(ticket(1))
                first = await anext(records)
                os.kill(handle.pid, signal.SIGKILL)
                await bus.publish(ticket(2))
                second = await anext(records)
            assert process.poll() is None
        assert [first.message.design, second.message.design] == ["d1", "d2"]


async def test_it_ends_without_a_word_when_its_server_stays_away(tmp_path: Path) -> None:
    program = tmp_path / "designer.py"
    program.write_text(EXAMPLE.read_text().replace("max_reconnect_attempts=30", "max_reconnect_attempts=1"))
    with anyio.fail_after(40), contextlib.ExitStack() as stack:
        async with served(tmp_path / "bus", role="scorer") as (handle, bus):
            process = stack.enter_context(stranger(handle.url, tmp_path, token=handle.token, program=program))
            await bus.publish(ticket(1))
            async with bus.follow("EVENT") as records:
                await anext(records)
        assert await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True) == 0
    assert (tmp_path / "stranger.log").read_text() == ""


async def test_a_key_that_allows_a_designer_allows_it(tmp_path: Path) -> None:
    """On a broker with allow-lists it needs the key of its role, and one line to be changed."""
    with broker(tmp_path / "broker", RUN) as made:
        directory = tmp_path / "role"
        directory.mkdir()
        program = directory / "designer.py"
        program.write_text(EXAMPLE.read_text().replace(TOKEN_LOGIN, KEY_LOGIN))
        shutil.copyfile(made.seed("designer"), directory / "designer.seed")
        await provision(made.url, run=RUN, store_gb=0.25, **made.login())
        async with connect(made.url, run=RUN, role=ADMIN, instance="1", **made.login()) as bus:
            with stranger(made.url, directory, program=program), anyio.fail_after(30):
                await bus.publish(ticket(1))
                async with bus.follow("EVENT") as records:
                    assert (await anext(records)).message.design == "d1"
                while (await bus.stream_info("TASK")).messages:  # noqa: ASYNC110 (another process acknowledges)
                    await anyio.sleep(0.01)
