"""The live page of a run: what its routes answer, to whom, and that it stops the run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import ClientSession, CookieJar
from aiohttp.test_utils import TestClient, TestServer
from anyio.streams.buffered import BufferedByteReceiveStream
from scenes import cast_run
from scenes.browser import browsing
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

from bus.messages import Heartbeat
from engine.busview.attach import order
from engine.errors import SpadeError
from engine.records import history
from engine.run import RunDirectory
from engine.views import overview, pipeline, report, watch

TOKEN = "the-token"
PICTURE = """(() => {
  const frame = document.getElementById("pipeline").getBoundingClientRect();
  const texts = [...document.querySelectorAll("#pipeline text")].map(
    one => ({name: one.textContent, box: one.getBoundingClientRect()}));
  const inside = ({box}) => box.left >= frame.left && box.right <= frame.right;
  const meet = ({box: a}, {box: b}) =>
    a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
  const bad = texts.filter((one, at) => !inside(one) || texts.slice(at + 1).some(other => meet(one, other)));
  return [Math.min(...texts.map(one => one.box.height)), bad.map(one => one.name)];
})()"""
"""The height of the smallest text of the picture, and the texts that meet another or are cut off."""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with one environment, played in both arms."""
    toy = config(tmp_path / "runs")
    directory = RunDirectory.of(toy)
    with directory.locked():
        directory.adopt(toy)
    connection = history.create(directory.database)
    told = [policy(0), ready("d1"), finished("e1"), finished("e2", arm="hinted"), scored("d1"), summary(0)]
    history.apply(connection, events([*told, batch(0, 1), policy(1), serving(0), evaluation(1), summary(1)]))
    waits = {"open_tickets": 3.0, "environments": 4.0, "open_plays": 5.0, "round_closed": 1.0}
    plays = {"in_hand": 8.0, "played": 6.0}
    beats = [
        Heartbeat(role=role, instance=f"{role}-0", state="running", statistics=figures)
        for role, figures in (("scorer", waits), ("evaluator", plays), ("agent", {"in_hand": 9.0}))
    ]
    history.put_gauges(connection, [(1000.0, beat) for beat in beats])
    connection.close()
    directory.logs.mkdir(exist_ok=True)
    (directory.logs / "learner.out").write_text("one\ntwo\n")
    return directory


@pytest.fixture
async def client(run: RunDirectory) -> AsyncIterator[TestClient]:
    server = TestServer(watch.make_app(run, TOKEN, order))
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


async def test_each_edge_of_the_pipeline_has_depth_rate_and_age(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.time, "time", lambda: 1062.0)
    edges = {edge.pop("name"): edge for edge in (await read(client, "/api/status"))["pipeline"]}
    depths = {name: edge["depth"] for name, edge in edges.items()}
    assert depths == {
        "tickets": 3, "environments": 4, "episodes": 5, "rounds": 1, "versions": 1, "requests": None,
        "held-out plays": 2,
    }  # fmt: skip
    # e1 and e2 ended in the seconds 1002 and 1003
    assert edges["episodes"] == {
        "source": "agent", "target": "scorer", "depth": 5, "per_minute": 1.0, "age": 59.0
    }  # fmt: skip
    assert edges["environments"]["per_minute"] == 0.0, "one is no rate"


async def test_the_report_is_served_once_it_is_written(client: TestClient, run: RunDirectory) -> None:
    async with client.get("/report") as answer:
        assert answer.status == 404
    run.report.write_text("<p>the report")
    async with client.get("/report") as answer:
        assert (answer.status, await answer.text()) == (200, "<p>the report")


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
        TestServer(watch.make_app(run, TOKEN, order)) as server,
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


async def cast(part: str, directory: Path) -> anyio.abc.Process:
    """Start a part of a run without a model (:mod:`scenes.cast_run`)."""
    script = Path(cast_run.__file__)
    environment = os.environ | {"PYTHONPATH": f"{script.parents[2]}{os.pathsep}{script.parents[1]}"}
    command = [sys.executable, "-P", str(script), part, str(directory)]
    return await anyio.open_process(command, stdin=subprocess.DEVNULL, stderr=None, env=environment)


@asynccontextmanager
async def living(directory: Path, phases: list[str]) -> AsyncIterator[RunDirectory]:
    """A run of a real supervisor, broker and scorer; it drains at the end, and ``phases`` were shown."""
    run = RunDirectory.of(cast_run.recipe(directory))
    async with await cast("run", directory) as process:
        assert process.stdout is not None
        with anyio.fail_after(30):
            while not (run.root / "bus.json").exists():  # noqa: ASYNC110 - another process writes it
                await anyio.sleep(0.05)
        try:
            yield run
        except BaseException:
            process.kill()  # a test that fails does not wait for a run without end
            raise
        process.terminate()
        phases += b"".join([chunk async for chunk in process.stdout]).decode().split()
        assert await process.wait() == 0


async def when(client: TestClient, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first status that meets ``condition``."""
    with anyio.fail_after(20):
        while True:
            async with client.get("/api/status") as answer:
                state = await answer.json() if answer.status == 200 else None
            if state and condition(state):
                return state
            await anyio.sleep(0.1)


async def test_a_run_pauses_and_goes_on(tmp_path: Path) -> None:
    phases: list[str] = []
    async with (
        living(tmp_path, phases) as run,
        TestClient(
            TestServer(watch.make_app(run, TOKEN, order)), headers={"Authorization": f"Bearer {TOKEN}"}
        ) as client,
    ):
        await when(client, lambda state: state["rounds"] >= 2)
        async with client.post("/api/pause") as answer:
            assert (answer.status, await answer.text()) == (202, f"{watch.ORDERS['pause']}\n")
        await when(client, lambda state: state["state"] == "paused")
        await when(client, lambda state: not state["gauges"]["scorer/scorer-0"]["open_plays"])
        still = (await when(client, bool))["events"]
        await anyio.sleep(2)  # in which a run that goes on plays many rounds
        paused = await when(client, bool)
        assert (paused["events"], paused["seconds_left"]) == (still, None)
        assert overview.read(str(run.root), tmp_path).healthy
        await order(run, "resume")
        await when(
            client, lambda state: state["state"] == "running" and state["rounds"] > paused["rounds"] + 2
        )
    assert {"running", "paused"} <= set(phases)
    with pytest.raises(SpadeError, match="not running"):
        await order(run, "pause")


@pytest.mark.slow
@pytest.mark.timeout(240)  # a browser draws slowly where others are busy
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium (a package of the distribution)")
async def test_a_browser_shows_environments_and_orders_pauses(run: RunDirectory, tmp_path: Path) -> None:
    """Both widths hold the page; a role that is killed shows; curves move; pause and resume work."""
    async with TestServer(watch.make_app(run, TOKEN, order)) as server:
        address = str(server.make_url("/").with_query(token=TOKEN).with_fragment("d1"))
        async with browsing(address, tmp_path / "still") as tab:
            await tab.until("document.querySelectorAll('#charts svg').length > 1")
            shown = await tab.value("document.body.innerText")
            for part in ("class CountEnv", "plain, return 1", "hinted, return 1", "Return of the agent"):
                assert part in shown
            await tab.until("document.querySelectorAll('tr[data-design]').length === 1")
            for width in (1400, 390):
                await tab.resize(width)
                assert await tab.value("document.documentElement.scrollWidth") <= width
                letters, unreadable = await tab.value(PICTURE)
                assert letters > 10, f"pixels of the smallest text at {width}"
                assert unreadable == [], width
            episodes = "document.querySelector('.edge[data-name=episodes]').textContent"
            assert "episodes 5" in await tab.value(episodes)
            report.write(run)
            await tab.call("Page.navigate", url=str(server.make_url("/report")))
            await tab.until("document.querySelectorAll('.chart svg').length > 1")
            select = "const one = document.getElementById('axis'); one.value = 'plays'; one.onchange();"
            await tab.value(f"(() => {{ {select} }})()")
            await tab.until(
                "[...document.querySelectorAll('.xtitle')].every(one => /plays|tokens/.test(one.textContent))"
            )
    async with (
        living(tmp_path / "living", []) as alive,
        TestServer(watch.make_app(alive, TOKEN, order)) as server,
    ):
        address = str(server.make_url("/").with_query(token=TOKEN))
        async with browsing(address, tmp_path / "moving") as tab:
            await tab.until("document.querySelectorAll('#charts svg').length > 1")
            drawn = await tab.value("drawnAt")
            await tab.until(f"Number(drawnAt) > {drawn} + 50")
            moving = "document.querySelector('.edge[data-name=episodes]').textContent"
            await tab.until(f"/^episodes [0-9,.]+ per minute[0-9]+ s ago$/.test({moving})")
            await tab.value("document.getElementById('pause').click()")
            await tab.until("document.getElementById('state').textContent.startsWith('paused')")
            await tab.until("document.getElementById('pause').disabled")
            await tab.value("document.getElementById('resume').click()")
            await tab.until("document.getElementById('state').textContent.startsWith('running')")
            async with await cast("role", tmp_path / "living") as process:
                shows = (
                    "[...document.querySelectorAll('.role{}')].some(e => e.textContent.includes('evaluator'))"
                )
                await tab.until(shows.format(""))
                process.kill()
                assert await tab.until(shows.format(".silent")) < 5.0
            assert not await tab.value("document.querySelectorAll('.role.silent').length > 1")
