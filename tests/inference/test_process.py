"""Our side of a vLLM process, with small programs in vLLM's place."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import psutil
import pytest

from engine.config import Config, ModelConfig, RunConfig, ServerConfig
from engine.errors import SpadeError
from engine.inference import process as module
from engine.inference.process import ServerFailed, causes, last_words, reachable_host, serve
from engine.inference.vllm import open_session

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            print("ValueError: told to", flush=True)
            import os; os._exit(3)
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
print("started", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
FAILING = "print('loading'); raise ValueError('block size 16 is not supported')"
SILENT = "import time; print('thinking', flush=True); time.sleep(300)"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch):
    def choose(code: str) -> None:
        monkeypatch.setattr(
            module, "command", lambda config, path, port, **_: [sys.executable, "-c", code, str(port)]
        )

    return choose


def config(**server) -> Config:
    return Config(
        run=RunConfig(name="t"),
        model=ModelConfig(path="x"),
        server=ServerConfig(**{"start_seconds": 10.0, **server}),
    )


async def test_a_healthy_server_is_yielded_and_gone_afterwards(program, tmp_path: Path) -> None:
    program(HEALTHY)
    log_path = tmp_path / "logs" / "server.log"
    async with open_session() as session:
        async with serve(config(), tmp_path, index=0, log_path=log_path, session=session) as server:
            assert psutil.pid_exists(server.pid)
            async with session.get(server.url + "/health") as response:
                assert response.status == 200
        assert not psutil.pid_exists(server.pid)
    assert "started" in log_path.read_text()
    assert str(server.port) in log_path.read_text()


async def test_a_death_is_noticed_with_its_last_words(program, tmp_path: Path) -> None:
    program(HEALTHY)
    async with (
        open_session() as session,
        serve(config(), tmp_path, index=0, log_path=tmp_path / "log", session=session) as server,
    ):
        with pytest.raises(Exception):  # noqa: B017, PT011 - whichever way a dying server drops the line
            await session.get(server.url + "/die")
        with anyio.fail_after(10):
            assert await server.wait() == "vLLM ended with status 3: ValueError: told to"


async def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(program, tmp_path: Path) -> None:
    program(FAILING)
    async with open_session() as session:
        with pytest.raises(ServerFailed, match="status 1 before it was ready") as caught:
            async with serve(config(), tmp_path, index=0, log_path=tmp_path / "log", session=session):
                pass
    assert "block size 16 is not supported" in str(caught.value)
    assert caught.value.remedy


async def test_a_server_that_takes_too_long_is_ended(program, tmp_path: Path) -> None:
    program(SILENT)
    async with open_session() as session:
        with pytest.raises(ServerFailed, match=r"not ready within 0 s(.|\n)*thinking"):
            async with serve(
                config(start_seconds=0.4), tmp_path, index=0, log_path=tmp_path / "log", session=session
            ):
                pass
    mine = psutil.Process().children(recursive=True)
    assert not [child for child in mine if SILENT in child.cmdline()]


async def test_cancellation_ends_the_server(program, tmp_path: Path) -> None:
    program(HEALTHY)
    async with open_session() as session:
        with anyio.CancelScope() as scope:
            async with serve(
                config(), tmp_path, index=0, log_path=tmp_path / "log", session=session
            ) as server:
                scope.cancel()
                await anyio.sleep_forever()
    assert not psutil.pid_exists(server.pid)


async def test_a_taken_port_starts_nothing(program, tmp_path: Path) -> None:
    program(HEALTHY)
    async with (
        open_session() as session,
        serve(config(), tmp_path, index=0, log_path=tmp_path / "log", session=session) as server,
    ):
        with pytest.raises(SpadeError, match="is taken"):
            async with serve(
                config(port=server.port), tmp_path, index=0, log_path=tmp_path / "second", session=session
            ):
                pass
    assert not (tmp_path / "second").exists()


def test_last_words_prefer_the_error(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("INFO one\nRuntimeError: the cause\nINFO shutting down\n\n")
    assert last_words(path) == "RuntimeError: the cause"
    assert last_words(path, 2) == "RuntimeError: the cause\nINFO shutting down"
    path.write_text("")
    assert last_words(path) == "no output"


def test_causes_are_the_exceptions_without_their_tracebacks(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        "(APIServer pid=1) WARNING 11-29 [a.py:1] errors like `OSError: [Errno 24] too many`.\n"
        "(EngineCore pid=2) ERROR 11-29 18:12:36 [core.py:1510]     raise ValueError(\n"
        "(EngineCore pid=2) ERROR 11-29 18:12:36 [core.py:1510] ValueError: too little memory\n"
        "ValueError: too little memory\n"
        "RuntimeError: Engine core initialization failed.\n"
        "RuntimeError: a third\n"
    )
    assert causes(path) == "ValueError: too little memory RuntimeError: Engine core initialization failed."
    with path.open("ab") as log:
        log.truncate(1 << 34)  # weeks of output are not read
        log.seek(0, 2)
        log.write(b"\nValueError: the last one\n")
    assert causes(path) == "ValueError: the last one"


@pytest.mark.parametrize(
    ("listens", "bus", "announced"),
    [
        (None, "", "127.0.0.1"),
        (None, "nats://127.0.0.1:4222", "127.0.0.1"),
        ("10.1.2.3", "nats://127.0.0.1:4222", "10.1.2.3"),
        ("0.0.0.0", "", "127.0.0.1"),
        ("0.0.0.0", "nats://127.0.0.1:4222,nats://10.1.2.3:4222", "127.0.0.1"),
        ("::", "tls://localhost", "127.0.0.1"),
    ],
)
def test_a_server_is_announced_by_an_address_that_others_reach(listens, bus: str, announced: str) -> None:
    server = ServerConfig(args={} if listens is None else {"host": listens})
    assert reachable_host(server, bus) in (announced, "[::1]" if "localhost" in bus else announced)
