"""Starts one vLLM process, waits until it is ready, watches it, and ends it with all its children."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import anyio
import anyio.abc

from engine.config import Config, ServerConfig
from engine.errors import SpadeError
from engine.inference.guarded import end_of, guarded
from engine.inference.launch import LOOPBACK, command, environment, port_for
from engine.inference.vllm import VllmClient

EXTERNAL_SECONDS = 2.0
"""Seconds between two health checks of an external server."""
_EXTERNAL_MISSES = 3
_HEALTH_SECONDS = 5.0
_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_CAUSE_BYTES = 256 * 1024
_EXCEPTION = re.compile(r"^(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w+(?:Error|Exception): .+)$", re.MULTILINE)
_HARMLESS = re.compile(r"\) (WARNING|INFO) ")

Ended = Callable[[], Awaitable[str]]
"""Waits until a server has ended and returns the reason."""


class ServerFailed(SpadeError):
    """A vLLM process did not start, or ended by itself."""


@dataclass(frozen=True)
class VllmProcess:
    """A running server. ``pid`` is that of its guardian; ``log_path`` is the file of vLLM's output."""

    url: str
    port: int
    log_path: Path
    process: anyio.abc.Process

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait(self) -> str:
        """Wait until the process has ended; return the reason as text."""
        status = await self.process.wait()
        return f"vLLM ended with status {status}: {last_words(self.log_path)}"


@asynccontextmanager
async def serve(
    config: Config,
    model_path: Path,
    *,
    index: int,
    log_path: Path,
    session: aiohttp.ClientSession,
    updates: bool = True,
) -> AsyncIterator[VllmProcess]:
    """Start server ``index`` and yield it once it is healthy; end it and all its children on exit.

    Without ``updates`` it cannot load other weights. Raises SpadeError when the port is taken, ServerFailed
    with the end of the log when it does not start within ``[server] start_seconds``.
    """
    port, host = port_for(config.server, index), reachable_host(config.server, config.bus.url)
    words = command(config, model_path, port, updates=updates)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("a") as stream:
        stream.write(f"\n{time.strftime('%FT%T')} {subprocess.list2cmdline(words)}\n")
    variables = environment(config, index)
    async with guarded(words, log=log_path, environment=variables, inherit=False) as process:
        server = VllmProcess(f"http://{host}:{port}", port, log_path, process)
        await _healthy(server, VllmClient(server.url, session), config.server.start_seconds)
        yield server


@asynccontextmanager
async def external_server(
    url: str, session: aiohttp.ClientSession, *, seconds: float, key: str
) -> AsyncIterator[tuple[VllmClient, Ended]]:
    """Yield the client of a running server once it is healthy, and a function that waits for its end.

    Raises ServerFailed after ``seconds``; ``key`` is the key of the recipe that names the server.
    """
    client = VllmClient(url, session)
    if not await client.until_healthy(seconds=seconds):
        raise ServerFailed(
            f"the server at {client.url} did not answer within {seconds:.0f} s",
            where=key,
            remedy=f"Start it, or take it out of {key}.",
        )

    async def ended() -> str:
        misses = 0
        while misses < _EXTERNAL_MISSES:
            await anyio.sleep(EXTERNAL_SECONDS)
            misses = 0 if await client.healthy(deadline=_HEALTH_SECONDS) else misses + 1
        return "it does not answer any more"

    yield client, ended


def reachable_host(server: ServerConfig, bus_url: str) -> str:
    """Return the host in the URL of a server that is started here: the one that it listens on.

    Where it listens on all, it is the address from which this host reaches the recipe's bus.
    """
    host = str(server.args.get("host", LOOPBACK))
    if host not in ("0.0.0.0", "::"):
        return host
    if not bus_url:
        return LOOPBACK
    first = urlsplit(bus_url.partition(",")[0])
    family, kind, _, _, address = socket.getaddrinfo(
        first.hostname, first.port or 4222, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        found = str(probe.getsockname()[0])
    return f"[{found}]" if ":" in found else found


def last_words(log_path: Path, lines: int = 1) -> str:
    """Return the last ``lines`` of a server's log; for one line, the last one that names an error."""
    found = [line.rstrip() for line in end_of(log_path, _TAIL_BYTES).splitlines() if line.strip()]
    if lines == 1:
        errors = [line for line in found[-200:] if "rror" in line and not _HARMLESS.search(line)]
        return (errors or found or ["no output"])[-1][-400:]
    return "\n".join(found[-lines:])


def causes(log_path: Path) -> str:
    """Return the exceptions that a server's log names, each once, without their tracebacks; at most two."""
    found = [match.group(1)[:400] for match in _EXCEPTION.finditer(end_of(log_path, _CAUSE_BYTES))]
    return " ".join(list(dict.fromkeys(found))[:2])


async def _healthy(server: VllmProcess, client: VllmClient, seconds: float) -> None:
    """Return when the server answers; raise ServerFailed when it ends first or takes too long."""
    if await client.until_healthy(seconds=seconds, alive=lambda: server.process.returncode is None):
        return
    if server.process.returncode is None:
        what = f"vLLM was not ready within {seconds:.0f} s"
        remedy = "Raise [server] start_seconds, or find the cause in the log."
    else:
        what = f"vLLM ended with status {server.process.returncode} before it was ready"
        remedy = "[server.args] and [server.environment] are its flags."
    named = causes(server.log_path)
    reason = named or f"The end of its log:\n{last_words(server.log_path, _TAIL_LINES)}\n"
    raise ServerFailed(f"{what}. {reason}", where=str(server.log_path), remedy=remedy)
