"""The figures of ``spade bus top``: depths, limits, rates and ages of streams and consumers."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from rich.table import Table

from bus import Bus
from bus.subjects import STREAMS
from engine.text import duration

Figures = dict[str, Any]


async def read(bus: Bus) -> Figures:
    """Return the broker's counters of a run's streams and their consumers."""
    streams, consumers = {}, {}
    for kind in STREAMS:
        name = bus.names.stream(kind)
        info = await bus.connection.api(f"STREAM.INFO.{name}")
        state, config = info["state"], info["config"]
        limits = ((state["bytes"], config["max_bytes"]), (state["messages"], config["max_msgs"]))
        newest = datetime.fromisoformat(state["last_ts"]).timestamp()
        streams[kind] = {
            "messages": state["messages"],
            "bytes": state["bytes"],
            "share": max((used / limit for used, limit in limits if limit > 0), default=None),
            "last": state["last_seq"],
            "newest_age_s": max(time.time() - newest, 0.0) if state["last_seq"] else None,
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
    """Return ``now`` with rates per second since ``before``; None for new streams and consumers."""
    found = {**now, "interval_s": max(now["time"] - before["time"], 1e-9)}
    for part, counter in (("streams", "last"), ("consumers", "delivered")):
        found[part] = {}
        for name, figures in now[part].items():
            old = before[part].get(name)
            rate = None if old is None else (figures[counter] - old[counter]) / found["interval_s"]
            found[part][name] = {**figures, "per_s": rate}
    return found


def table(figures: Figures) -> Table:
    """Return the figures as a table for a terminal."""
    result = Table(box=None, padding=(0, 1, 0, 0), title=f"run {figures['run']}", title_justify="left")
    for name in ("stream / consumer", "messages", "MB", "full", "unacked", "again", "per s", "newest"):
        first = name.startswith("stream")  # the one column that wraps in a narrow terminal
        result.add_column(name, justify="left" if first else "right", no_wrap=not first)
    rate = "{:,.1f}".format
    for name, one in figures["streams"].items():
        size, full = f"{one['bytes'] / 1e6:,.1f}", f"{one['share'] or 0.0:.0%}"
        newest = duration(one["newest_age_s"])
        result.add_row(name, f"{one['messages']:,}", size, full, "", "", rate(one["per_s"] or 0.0), newest)
    for name, one in figures["consumers"].items():
        cells = (f"{one[key]:,}" for key in ("unacknowledged", "redelivered"))
        result.add_row(f"  {name}", f"{one['pending']:,}", "", "", *cells, rate(one["per_s"] or 0.0), "")
    return result
