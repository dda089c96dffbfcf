"""The figures of ``spade bus top``: depths, limits, rates and ages of streams and consumers."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from rich.table import Table

from bus import NatsBus
from bus.subjects import STREAMS
from engine.text import duration

Figures = dict[str, Any]
_FULL, _NEARLY_FULL = 0.9, 0.7


async def read(bus: NatsBus) -> Figures:
    """Return the broker's counters of a run's streams and their consumers."""
    streams, consumers = {}, {}
    for kind in STREAMS:
        name = bus.names.stream(kind)
        info = await bus.connection.api(f"STREAM.INFO.{name}")
        state, config = info["state"], info["config"]
        limits = ((state["bytes"], config["max_bytes"]), (state["messages"], config["max_msgs"]))
        streams[kind] = {
            "messages": state["messages"],
            "bytes": state["bytes"],
            "share": max((used / limit for used, limit in limits if limit > 0), default=None),
            "last": state["last_seq"],
            "newest_age_s": _age(state.get("last_ts")) if state["last_seq"] else None,
        }
        page = await bus.connection.api(f"CONSUMER.LIST.{name}", {"offset": 0})
        for one in page.get("consumers") or []:
            consumers[f"{kind} {one['name']}"] = {
                "pending": one["num_pending"],
                "unacknowledged": one["num_ack_pending"],
                "redelivered": one["num_redelivered"],
                "delivered": one["delivered"]["consumer_seq"],
            }
    return {"run": bus.run, "time": time.time(), "streams": streams, "consumers": consumers}


def compare(now: Figures, before: Figures) -> Figures:
    """Return ``now`` with rates per second since ``before``; None for what is new."""
    seconds = max(now["time"] - before["time"], 1e-9)
    found = {**now, "interval_s": seconds}
    for part, counter in (("streams", "last"), ("consumers", "delivered")):
        found[part] = {}
        for name, figures in now[part].items():
            old = before[part].get(name)
            rate = None if old is None else (figures[counter] - old[counter]) / seconds
            found[part][name] = {**figures, "per_s": rate}
    return found


def table(figures: Figures) -> Table:
    """Return the figures as a table for a terminal."""
    result = Table(box=None, padding=(0, 2, 0, 0), title=f"run {figures['run']}", title_justify="left")
    for name in ("stream / consumer", "messages", "MB", "full", "unacked", "again", "per s", "newest"):
        result.add_column(name, justify="left" if name.startswith("stream") else "right", no_wrap=True)
    for name, one in figures["streams"].items():
        full = one["share"] or 0.0
        result.add_row(
            name, f"{one['messages']:,}", f"{one['bytes'] / 1e6:,.1f}", f"{full:.0%}", "", "",
            _rate(one["per_s"]), duration(one["newest_age_s"]),
            style="red" if full >= _FULL else "yellow" if full >= _NEARLY_FULL else "",
        )  # fmt: skip
    for name, one in figures["consumers"].items():
        cells = (f"{one[key]:,}" for key in ("unacknowledged", "redelivered"))
        result.add_row(f"  {name}", f"{one['pending']:,}", "", "", *cells, _rate(one["per_s"]), "")
    return result


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _age(moment: str | None) -> float | None:
    return None if moment is None else max(time.time() - datetime.fromisoformat(moment).timestamp(), 0.0)
