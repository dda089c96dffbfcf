"""The figures of a bus as tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from engine.busview.figures import ClientFigures, ConsumerFigures, PresentFigures, StreamFigures, Top
from engine.busview.words import amount, rate, share, size, span
from engine.lineage import Version

FULL, NEARLY_FULL = 0.9, 0.7
SILENT_SECONDS = 5.0
WIDE = 120


def screen(top: Top, width: int = WIDE) -> RenderableType:
    """Return one screen: a headline, streams, consumers, clients; fewer columns below ``WIDE``."""
    wide = width >= WIDE
    blocks: list[RenderableType] = [_headline(top), _streams(top.streams, wide=wide)]
    if top.consumers:
        blocks.append(_consumers(top.consumers))
    if top.present:
        blocks.append(_present(top.present, wide=wide))
    blocks.append(_clients(top, wide=wide))
    how = top.server if top.live else f"{top.server}, its run rests"
    return Panel(Group(*blocks), title=f"spade bus · {top.run} · {how}", title_align="left")


def _headline(top: Top) -> Text:
    text = Text(f"last event {span(top.event_age_s)} ago   dead letters ")
    text.append(amount(top.dead_letters), style="yellow" if top.dead_letters else "")
    if top.interval_s is not None:
        text.append(f"   rates over {span(top.interval_s)}", style="dim")
    return text


def _grid(first: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a table; columns whose name is empty are left out."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for column in filter(None, columns):
        table.add_column(column, justify="right", no_wrap=True)
    for name, *cells in rows:
        table.add_row(name, *(cell for column, cell in zip(columns, cells, strict=True) if column))
    return table


def _streams(streams: Sequence[StreamFigures], *, wide: bool) -> Table:
    columns = ["messages", "bytes", "full", "first", "last", "in/s", "out/s", "newest", "oldest"]
    if not wide:
        columns[3] = ""
    return _grid(
        "stream",
        columns,
        (
            (
                one.stream,
                amount(one.messages),
                size(one.bytes),
                Text(share(one.share), style=_alarm(one.share)),
                str(one.first),
                str(one.last),
                rate(one.in_per_s),
                rate(one.out_per_s),
                span(one.last_age_s),
                span(one.first_age_s),
            )
            for one in streams
        ),
    )


def _alarm(part: float | None) -> str:
    if part is None or part < NEARLY_FULL:
        return ""
    return "red" if part >= FULL else "yellow"


def _consumers(consumers: Sequence[ConsumerFigures]) -> Table:
    return _grid(
        "consumer",
        ("pending", "unacked", "again", "pulls", "out/s", "oldest"),
        (
            (
                f"{one.stream} {one.client or one.consumer}",
                amount(one.pending),
                amount(one.ack_pending),
                amount(one.redelivered),
                amount(one.waiting),
                rate(one.out_per_s),
                span(one.oldest_age_s),
            )
            for one in consumers
        ),
    )


def _present(present: Sequence[PresentFigures], *, wide: bool) -> Table:
    return _grid(
        "present",
        ("state", "slots", "policy", "up", "said", "host" if wide else ""),
        (
            (
                f"{one.role}/{one.instance}",
                one.state,
                amount(one.slots),
                "-" if one.version is None else str(Version.unpack(one.version)),
                span(one.up_s),
                span(one.age_s),
                one.host or "-",
            )
            for one in present
        ),
    )


def _clients(top: Top, *, wide: bool) -> RenderableType:
    if not top.clients:
        return Text("no client is connected or heard of", style="dim")
    columns = ["state", "heard", "rtt", "idle", "in/s", "out/s", "in B/s", "out B/s", "pending"]
    if not wide:
        columns[3] = columns[6] = columns[7] = ""
    return _grid(
        "client",
        columns,
        (
            (
                f"{one.role}/{one.instance}",
                one.state or "-",
                Text(span(one.heard_s), style=_silence(one)),
                "-" if one.rtt_ms is None else f"{one.rtt_ms:.2f} ms",
                span(one.idle_s),
                rate(one.in_per_s),
                rate(one.out_per_s),
                size(one.in_bytes_per_s),
                size(one.out_bytes_per_s),
                size(one.pending_bytes),
            )
            for one in top.clients
        ),
    )


def _silence(one: ClientFigures) -> str:
    silent = one.heard_s is not None and one.heard_s > SILENT_SECONDS and one.state != "stopped"
    return "yellow" if silent else ""
