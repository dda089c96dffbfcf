"""The live page of a run: an HTTP server over its database, and orders to its supervisor.

Routes: ``/`` the page, ``/report``, ``/api/status``, ``/api/curves``, ``/api/environments``,
``/api/environments/DESIGN``, ``/api/logs``, ``/metrics`` for Prometheus, and ``POST /api/pause``,
``/api/resume``, ``/api/stop``. Each needs the token: as ``?token=``, in the cookie that the page sets, or as
a bearer token.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import anyio
import msgspec
from aiohttp import web
from anyio.abc import TaskStatus

from bus import BusError
from engine.errors import ConfigError, SpadeError
from engine.records import status
from engine.records.envs import Catalogue
from engine.records.status import RunStatus
from engine.run import RunDirectory
from engine.telemetry import quiet_bus
from engine.views import report
from engine.views.charts import Row
from engine.views.overview import about, reading
from engine.views.pipeline import edges

COOKIE = "spade_token"
LOG_LINES = 200
_PAGE = Path(__file__).with_name("watch.html")
_RUN: web.AppKey[RunDirectory] = web.AppKey("run", RunDirectory)
_TOKEN: web.AppKey[str] = web.AppKey("token", str)

Order = Callable[[RunDirectory, Literal["pause", "resume"]], Awaitable[None]]
ORDERS: dict[Literal["pause", "resume"], str] = {
    "pause": "The run pauses: rounds under way are finished, no new ones begin.",
    "resume": "The run goes on.",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(
    run: RunDirectory,
    host: str,
    port: int,
    say: Callable[[str], None],
    order: Order,
    token: str = "",
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve the page of ``run`` until cancelled; ``port`` 0 takes a free one. ``say`` gets the address.

    ``order`` sends a command to the run's scorer.

    Raises SpadeError when the port cannot be had.
    """
    token = token or secrets.token_urlsafe(18)
    runner = web.AppRunner(make_app(run, token, order), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise SpadeError(
                f"The page cannot listen on {host}:{port}: {error.strerror}.",
                remedy="Name another one: ui.port of a run; --port of `spade watch`, where 0 is a free one.",
            ) from error
        name, number = runner.addresses[0][:2]
        say(f"http://{f'[{name}]' if ':' in name else name}:{number}/?token={quote(token, safe='')}")
        task_status.started()
        await anyio.sleep_forever()
    finally:
        await runner.cleanup()


def make_app(run: RunDirectory, token: str, order: Order) -> web.Application:
    """Return the application of ``run``; requests without ``token`` get status 401."""
    app = web.Application(middlewares=[_authorise, _explain])
    app[_RUN], app[_TOKEN] = run, token
    app.add_routes(
        [
            web.get("/", _page),
            web.get("/plotly.js", _plotly),
            web.get("/metrics", _metrics),
            web.get("/report", _report),
            web.get("/api/status", partial(_json, read_status)),
            web.get("/api/curves", partial(_json, read_curves)),
            web.get("/api/environments", partial(_json, read_environments)),
            web.get("/api/environments/{design}", _environment),
            web.get("/api/logs", partial(_json, read_logs)),
            web.post("/api/stop", _stop),
            *(web.post(f"/api/{name}", partial(_order, order, name)) for name in ORDERS),
        ]
    )
    return app


@web.middleware
async def _authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    token = request.app[_TOKEN]
    cookie = f"{COOKIE}_{request.url.port}"  # a browser sends a host's cookies to all of its ports
    given = (
        request.headers.get("Authorization", "").removeprefix("Bearer "),
        request.query.get("token", ""),
        request.cookies.get(cookie, ""),
    )
    wanted = token.encode()
    if not any(hmac.compare_digest(one.encode(errors="replace"), wanted) for one in given):
        raise web.HTTPUnauthorized(
            text="Open the address that `spade watch` printed: it ends with the token.\n"
        )
    response = await handler(request)
    if request.query.get("token"):
        response.set_cookie(cookie, token, httponly=True, samesite="Strict")
    return response


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors of the run as text: 404 for a name that is not there, 503 for a database that is not."""
    try:
        return await handler(request)
    except ConfigError as error:
        return web.Response(status=404, text=str(error))
    except SpadeError as error:
        return web.Response(status=503, text=str(error))


async def _page(request: web.Request) -> web.StreamResponse:
    return web.Response(text=_PAGE.read_text(encoding="utf-8"), content_type="text/html")


async def _plotly(request: web.Request) -> web.StreamResponse:
    import plotly.offline

    text = await anyio.to_thread.run_sync(plotly.offline.get_plotlyjs)
    headers = {"Cache-Control": "private, max-age=86400"}
    return web.Response(text=text, content_type="text/javascript", headers=headers)


async def _json(read: Callable[[RunDirectory], Any], request: web.Request) -> web.StreamResponse:
    return _answer(await anyio.to_thread.run_sync(read, request.app[_RUN]))


async def _environment(request: web.Request) -> web.StreamResponse:
    read = partial(read_environment, request.app[_RUN], request.match_info["design"])
    return _answer(await anyio.to_thread.run_sync(read))


async def _metrics(request: web.Request) -> web.StreamResponse:
    run = request.app[_RUN]
    with reading(run) as connection:
        text = metrics(run.root.name, await anyio.to_thread.run_sync(status.read, connection))
    return web.Response(text=text, content_type="text/plain", charset="utf-8")


async def _report(request: web.Request) -> web.StreamResponse:
    path = request.app[_RUN].report
    if not path.is_file():
        return web.Response(status=404, text="The report is not written yet: `spade report` writes it.\n")
    return web.FileResponse(path)


async def _order(order: Order, name: Literal["pause", "resume"], request: web.Request) -> web.StreamResponse:
    try:
        with quiet_bus():
            await order(request.app[_RUN], name)
    except (SpadeError, BusError) as error:
        return web.Response(status=409, text=str(error))
    return web.Response(status=202, text=f"{ORDERS[name]}\n")


async def _stop(request: web.Request) -> web.StreamResponse:
    """Ask the run's supervisor on this host to drain, as Ctrl-C does."""
    try:
        await anyio.to_thread.run_sync(request.app[_RUN].stop)
    except SpadeError as error:
        return web.Response(status=409, text=str(error))
    return web.Response(status=202, text="The run finishes the work in hand and stops.\n")


def _answer(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def read_status(run: RunDirectory) -> dict[str, Any]:
    """Return name, state, rounds, all fields of the status, the edges, and the roles with ages in seconds."""
    with reading(run) as connection:
        state = status.read(connection)
        roles = [
            {"role": row["role"], "instance": row["instance"], "state": row["state"],
             "age": time.time() - row["at"], "figures": msgspec.json.decode(row["statistics"])}
            for row in connection.execute("SELECT * FROM gauges ORDER BY role, instance")
        ]  # fmt: skip
        pipeline = edges(connection, state)
    fields: dict[str, Any] = msgspec.to_builtins(state)
    return about(run, state) | fields | {"roles": roles, "pipeline": pipeline}


def read_curves(run: RunDirectory) -> list[Row]:
    """Return the curves of the report."""
    with reading(run) as connection:
        return report.figures(connection)


def read_environments(run: RunDirectory) -> list[dict[str, Any]]:
    """Return all environments, the highest lower bound of regret first."""
    with reading(run) as connection:
        return [msgspec.to_builtins(one) for one in Catalogue(connection).select(sort="regret_low")]


def read_environment(run: RunDirectory, design: str) -> dict[str, Any]:
    """Return one environment with source, hint and recorded episodes. Raises ConfigError for none."""
    with reading(run) as connection:
        catalogue = Catalogue(connection)
        entry = catalogue.find(design)
        source, hint = catalogue.program(entry)
        fields: dict[str, Any] = msgspec.to_builtins(entry)
        return fields | {"source": source, "hint": hint, "plays": catalogue.plays(entry)}


def read_logs(run: RunDirectory) -> dict[str, list[str]]:
    """Return the last lines of each log of the run."""
    found = {}
    for path in sorted(path for path in run.logs.glob("*") if path.is_file()):
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 200 * LOG_LINES))
            found[path.name] = stream.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    return found


def metrics(name: str, state: RunStatus) -> str:
    """Return the status as Prometheus text, with ``name`` as the label of the run."""
    figures: dict[str, float | None] = {
        "step": state.step,
        "rounds_trained": state.rounds,
        "episodes_finished_total": state.episodes_finished,
        "environments_accepted_total": state.environments_accepted,
        "designs_rejected_total": state.designs_rejected,
        "tokens_sampled_total": state.tokens_sampled,
        "tokens_per_second": state.tokens_per_second,
        "max_staleness": state.max_staleness_seen,
        "valid_share": state.valid_share,
        "regret": state.regret,
        "silent_roles": len(state.stale_roles),
        "last_event_timestamp_seconds": state.last_event_at,
    }
    figures |= {f"round_{key}": value for key, value in (state.summary or {}).items() if _is_number(value)}
    run = f'run="{_label(name)}"'
    lines = [f"spade_{key}{{{run}}} {value}" for key, value in figures.items() if value is not None]
    lines += [
        f'spade_held_out_win_rate{{{run},suite="{_label(one.suite)}"}} {one.win}' for one in state.evaluations
    ]
    lines += [
        f'spade_gauge{{{run},role="{_label(role)}",name="{_label(key)}"}} {value}'
        for role, values in state.gauges.items()
        for key, value in values.items()
    ]
    return "\n".join(lines) + "\n"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
