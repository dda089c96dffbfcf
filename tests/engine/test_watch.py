"""The live page of a run: what its routes answer, to whom, and that it stops the run."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from aiohttp import ClientSession, CookieJar
from aiohttp.test_utils import TestClient, TestServer
from anyio.streams.buffered import BufferedByteReceiveStream
from scenes.small_run import (
    batch,
    config,
    evaluation,
    events,
    finished,
    policy,
    ready,
    scored,
    serving,
    summary,
)

from engine.records import history
from engine.run import RunDirectory
from engine.views import watch

TOKEN = "the-token"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with one environment, played in both arms."""
    toy = config(tmp_path / "runs")
    directory = RunDirectory.of(toy)
    with directory.locked():
        directory.adopt(toy)
    connection = history.create(directory.database)
    told = [policy(0), ready("d1"), finished("e1"), finished("e2", arm="hinted"), scored("d1"), summary(0)]
    history.apply(connection, events([*told, batch(0, 1), policy(1), serving(1), evaluation(1), summary(1)]))
    connection.close()
    directory.logs.mkdir(exist_ok=True)
    (directory.logs / "learner.out").write_text("one\ntwo\n")
    return directory


@pytest.fixture
async def client(run: RunDirectory) -> AsyncIterator[TestClient]:
    server = TestServer(watch.make_app(run, TOKEN))
    async with TestClient(server, headers={"Authorization": f"Bearer {TOKEN}"}) as opened:
        yield opened


async def read(client: TestClient, path: str) -> object:
    async with client.get(path) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def test_the_routes_answer_what_the_run_has(client: TestClient) -> None:
    state = await read(client, "/api/status")
    assert (state["run"], state["step"], state["steps"], state["state"]) == ("toy", 1, 1, "stopped")
    titles = [figure["layout"]["title"]["text"] for figure in await read(client, "/api/curves")]
    assert {"Held-out win rate (95 % intervals)", "Return of the agent"} <= set(titles)
    (entry,) = await read(client, "/api/environments")
    assert (entry["design"], entry["regret_low"]) == ("d1", 0.0)
    sheet = await read(client, "/api/environments/d1")
    assert "class CountEnv" in sheet["source"]
    assert [play["arm"] for play in sheet["plays"]] == ["plain", "hinted"]
    assert await read(client, "/api/logs") == {"learner.out": ["one", "two"]}


async def test_prometheus_reads_the_metrics(client: TestClient) -> None:
    async with client.get("/metrics") as answer:
        lines = (await answer.text()).splitlines()
    assert 'spade_step{run="toy"} 1' in lines
    assert 'spade_held_out_win_rate{run="toy",suite="mid"} 0.51' in lines
    assert 'spade_round_plain{run="toy"} 0.4' in lines
    for line in lines:
        float(line.rpartition(" ")[2])


async def test_a_request_without_the_token_gets_nothing(run: RunDirectory) -> None:
    async with (
        TestServer(watch.make_app(run, TOKEN)) as server,
        ClientSession(cookie_jar=CookieJar(unsafe=True)) as session,
    ):
        for path in ("/", "/api/status", "/metrics", "/api/status?token=guess"):
            async with session.get(server.make_url(path)) as answer:
                assert answer.status == 401
                assert "toy" not in await answer.text()
        async with session.post(server.make_url("/api/stop")) as answer:
            assert answer.status == 401
        async with session.get(server.make_url(f"/?token={TOKEN}")) as answer:
            assert answer.status == 200
            assert answer.cookies[f"{watch.COOKIE}_{server.port}"]["httponly"]
        async with session.get(server.make_url("/api/status"), cookies={"spade_token_1": "x"}) as answer:
            assert answer.status == 200, "its own cookie, whatever other pages of this host have set"


async def test_unknown_names_and_runs_without_a_database_are_explained(
    client: TestClient, run: RunDirectory
) -> None:
    async with client.get("/api/environments/nope") as answer:
        assert (answer.status, "There is no environment" in await answer.text()) == (404, True)
    run.database.unlink()
    async with client.get("/api/status") as answer:
        assert (answer.status, "cannot be read" in await answer.text()) == (503, True)


async def test_stop_sends_the_supervisor_a_signal(client: TestClient, run: RunDirectory) -> None:
    async with client.post("/api/stop") as answer:
        assert answer.status == 409
    hold = """
import signal, sys
from pathlib import Path
from engine.run import RunDirectory
with RunDirectory(Path(sys.argv[1])).locked():
    print("held", flush=True)
    signal.pause()
"""
    async with await anyio.open_process(
        [sys.executable, "-c", hold, str(run.root)], stdin=subprocess.DEVNULL
    ) as holder:
        assert holder.stdout is not None
        assert await BufferedByteReceiveStream(holder.stdout).receive_until(b"\n", 100) == b"held"
        async with client.post("/api/stop") as answer:
            assert answer.status == 202, await answer.text()
        assert await holder.wait() == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (a package of the distribution)")
@pytest.mark.parametrize("width", [1400, 390])
async def test_a_browser_draws_the_curves_and_opens_an_environment(
    run: RunDirectory, tmp_path: Path, width: int
) -> None:
    async with TestServer(watch.make_app(run, TOKEN)) as server:
        address = str(server.make_url("/").with_query(token=TOKEN).with_fragment("d1"))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
        command = [
            "chromium",
            *flags,
            f"--window-size={width},1000",
            "--virtual-time-budget=15000",
            "--dump-dom",
        ]
        shown = (await anyio.run_process([*command, address], check=True, stderr=None)).stdout.decode()
    assert "Return of the agent" in shown
    assert "<svg" in shown
    assert "class CountEnv" in shown
    for arm in ("plain, return 1", "hinted, return 1"):
        assert arm in shown
    assert shown.count("<tr data-design=") == 1
