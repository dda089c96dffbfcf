"""What `spade status` says of each server, from the gauges of its role and of the pool."""

from __future__ import annotations

from types import SimpleNamespace

from engine.records.status import ServerStatus
from engine.views.overview import server_rows


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
    "pool.server-h-1-0.opened": 0.0,
    "pool.server-h-1-0.usable": 1.0,
}
ROLE = {"server-h-1-0.update_seconds": 0.51, "server-h-1-0.paused_seconds": 0.06, "servers": 1.0}


def test_one_line_a_server_with_what_both_sides_know() -> None:
    assert rows(server("server-h-1-0"), supervisor=POOL, role=ROLE) == [
        (
            "server-h-1-0",
            "14 of 288 in flight, 1 versions behind, limit cut 2 times, breaker opened 0 times, "
            "last update 0.51 s, paused 0.06 s",
        )
    ]


def test_a_server_that_gets_nothing_says_so_and_lost_or_unknown_ones_say_nothing() -> None:
    shut = POOL | {"pool.server-h-1-0.usable": 0.0}
    found = rows(server("server-h-1-0"), server("gone", "killed"), server("new"), supervisor=shut)
    assert [name for name, _ in found] == ["server-h-1-0"]
    assert found[0][1].startswith("not in use, 14 of 288")
    assert rows(server("server-h-1-0")) == []
