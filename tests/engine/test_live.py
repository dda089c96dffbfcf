"""The view of a run: a panel in a terminal, plain lines elsewhere, a row per server in the status."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from scenes import small_run
from scenes.small_run import batch, config, evaluation, finished, policy, ready, scored, serving, summary

from bus.messages import Heartbeat
from engine.config import UiConfig
from engine.records import history
from engine.records import status as standing
from engine.records.status import RunStatus, ServerStatus
from engine.views import live
from engine.views.overview import own_roles, server_rows


@pytest.fixture(scope="module")
def status() -> RunStatus:
    connection = history.create(Path(":memory:"))
    messages = [policy(0), ready("d1"), ready("d2"), scored("d1"), finished("e1"), summary(0), policy(1)]
    history.apply(connection, small_run.events([*messages, batch(0, 1), serving(1), evaluation(1)]))
    beat = Heartbeat(
        role="scorer",
        instance="scorer-0",
        state="running",
        statistics={"open_plays": 7.0, "open_tickets": 0.0},
    )
    history.put_gauges(connection, [(1000.0, beat)])
    return standing.read(connection, now=1010.0)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=110, no_color=True), stream


def test_the_panel_shows_what_matters(status: RunStatus) -> None:
    screen, stream = console(terminal=True)
    screen.print(live.panel(status, config().run, "running"))
    text = stream.getvalue()
    assert text.endswith("╯\n\n")  # an echoed ^C stands in a line of its own
    for part in ("spade toy · running · round 1 of 1", "2, 1 live", "valid 1.00", "0.400, 0.600", "0.250"):
        assert part in text
    for part in ("▄", "held-out mid", "0.510 ± 0.039", "waiting  episodes 7", "75%", "published", "serving"):
        assert part in text
    connection = history.create(Path(":memory:"))
    screen.print(live.panel(standing.read(connection), config().run, "starting"))
    assert "none yet" in stream.getvalue()


def test_plain_lines_are_printed_on_news_only(status: RunStatus) -> None:
    screen, stream = console(terminal=False)
    clock = iter([100.0, 100.0, 101.0, 102.0, 102.0, 120.0, 120.0])
    view = live.make(config().run, config().ui, screen, clock=lambda: next(clock))
    view.update(status, "running")
    view.update(status, "running")
    view.update(status, "draining")
    view.update(status, "draining")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert (
        "step 1  round 1/1  left -  envs 2  valid 100%  plain 0.400  hinted 0.600  regret 0.250" in lines[0]
    )
    assert "mid 0.510±0.039@1" in lines[0]
    assert "draining" in lines[1]


def test_phases_before_the_first_round_show_their_seconds() -> None:
    phases = live.Phases()
    shown = [phases.timed(f"evaluating {played}/480", now) for played, now in ((0, 10.0), (210, 52.0))]
    assert shown == ["evaluating 0/480 (0.0 s)", "evaluating 210/480 (42 s)"]
    assert phases.timed("running", 60.0) == "running"
    assert phases.timed("draining", 61.0) == "draining (0.0 s)"


@pytest.mark.parametrize(
    ("mode", "terminal", "panel"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_the_view_follows_the_terminal_and_the_recipe(mode: str, terminal: bool, panel: bool) -> None:
    screen, _ = console(terminal=terminal)
    assert isinstance(live.make(config().run, UiConfig(live=mode), screen), live.LivePanel) is panel


def test_the_panel_can_be_shown_and_updated(status: RunStatus) -> None:
    screen, stream = console(terminal=True)
    view = live.LivePanel(config().run, screen)
    with view.showing():
        view.update(status, "running")
        view.say("warning: something")
    assert "warning: something" in stream.getvalue()


def test_warnings_reach_the_view_with_their_fields() -> None:
    screen, stream = console(terminal=False)
    live.sink(live.make(config().run, config().ui, screen))(
        "warning", {"event": "role.slow", "role": "agent", "level": "warning"}
    )
    assert "warning: role.slow role=agent" in stream.getvalue()


def server(name: str, lost: str | None = None) -> ServerStatus:
    return ServerStatus(
        server=name, url="http://x", step=3, version="3", packed=3, canary_error=0.0, lost=lost
    )


def rows(*servers: ServerStatus, **gauges: dict[str, float]) -> list[tuple[str, str]]:
    return server_rows(SimpleNamespace(servers=servers, gauges=gauges))


POOL = {
    "pool.in_flight": 40.0,
    "pool.server-h-1-0.in_flight": 14.0,
    "pool.server-h-1-0.limit": 288.0,
    "pool.server-h-1-0.lag": 1.0,
    "pool.server-h-1-0.cuts": 2.0,
    "pool.server-h-1-0.idle": 0.25,
    "pool.server-h-1-0.opened": 0.0,
    "pool.server-h-1-0.usable": 1.0,
}
ROLE = {"server-h-1-0.update_seconds": 0.51, "server-h-1-0.paused_seconds": 0.06, "servers": 1.0}


def test_one_line_a_server_with_what_both_sides_know() -> None:
    assert rows(server("server-h-1-0"), supervisor=POOL, role=ROLE) == [
        (
            "server-h-1-0",
            "14 of 288 in flight, 1 versions behind, idle 25% of its last round, limit cut 2 times, "
            "breaker opened 0 times, "
            "last update 0.51 s, paused 0.06 s",
        )
    ]


def test_a_server_that_gets_nothing_says_so_and_lost_or_unknown_ones_say_nothing() -> None:
    shut = POOL | {"pool.server-h-1-0.usable": 0.0}
    found = rows(server("server-h-1-0"), server("gone", "killed"), server("new"), supervisor=shut)
    assert [name for name, _ in found] == ["server-h-1-0"]
    assert found[0][1].startswith("not in use, 14 of 288")
    assert rows(server("server-h-1-0")) == []


def test_a_role_of_ones_own_is_shown_with_its_figures() -> None:
    gauges = {"counter/counter-0": {"won": 341.0, "lost": 2.0}, "agent/agent-0": {"won": 1.0}}
    assert own_roles(gauges) == [("counter-0", "won 341, lost 2")]
