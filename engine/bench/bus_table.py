"""The bus benchmark's result for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from engine.bench.bus import Figure, Report

_COLUMNS = (
    ("1 KB /s", "acked_1k_per_s", "{:,.0f}"),
    ("36 KB MB/s", "acked_36k_mb_per_s", "{:,.0f}"),
    ("1 MB MB/s", "acked_1m_mb_per_s", "{:,.0f}"),
    ("2 MB MB/s", "acked_2m_mb_per_s", "{:,.0f}"),
    ("accept p50 ms", "accept_p50_ms", "{:.2f}"),
    ("p99 ms", "accept_p99_ms", "{:.2f}"),
    ("age p50 ms", "age_p50_ms_at_500", "{:.2f}"),
    ("p99 ms", "age_p99_ms_at_500", "{:.2f}"),
)
_ORDER = ("full", "<= 0.1 s at a power cut", "<= 1 s at a power cut", "process crash", "none")


def show(report: Report, console: Console) -> None:
    """Print the figures by durability class, what the machine allows, and how busy it was."""
    console.print(_transports(report))
    for name, found in {**report.paths, **report.peers}.items():
        promise = f" (durability: {found.durability})" if found.durability else ""
        console.print(f"{name}{promise}: {found.absent or found.what}", style="dim" if found.absent else "")
    console.print(_ceilings(report))
    machine, load = report.machine, report.load
    console.print(
        f"{machine.processor}, {machine.cores} cores, Python {machine.python}, "
        f"nats-server {report.server['version']}, configuration {report.server['config_hash']}"
    )
    quiet = "quiet" if load["quiet"] else "not quiet: read throughput as a lower bound"
    console.print(
        f"Others used {load['others_median']:.2f} cores (most {load['others_max']:.2f}): {quiet}. "
        f"Lost {report.lost}, duplicates {report.duplicates}."
    )
    away = report.recovery["ack_ms"], report.recovery["delivery_ms"]
    console.print(
        f"After a kill -9 of the server the first acknowledgement came in {away[0].median:,.0f} ms (most "
        f"{away[0].high:,.0f}), the first delivery in {away[1].median:,.0f} ms (most {away[1].high:,.0f})."
    )
    for name, ahead in report.ahead_of.items():
        console.print(f"Ahead of {name}: {'yes' if ahead else 'no'}.")


def _transports(report: Report) -> Table:
    table = Table(title="Producer to consumer, median and range; age at 500/s of 36 KB")
    table.add_column("transport", no_wrap=True)
    for heading, _, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    rows = [(name, found, True) for name, found in report.paths.items()]
    rows += [(name, found, False) for name, found in report.peers.items()]
    for name, found, ours in sorted(rows, key=lambda row: _rank(row[1].durability)):
        style = "bold" if ours else ""
        if found.absent:
            continue
        cells = [_cell(getattr(found, field), form) for _, field, form in _COLUMNS]
        table.add_row(name, *cells, style=style)
    return table


def _rank(durability: str) -> int:
    return _ORDER.index(durability) if durability in _ORDER else len(_ORDER)


def _cell(figure: Figure | None, form: str) -> str:
    if figure is None:
        return "-"
    median = form.format(figure.median)
    return median if figure.runs == 1 else f"{median}\n{form.format(figure.low)}-{form.format(figure.high)}"


def _ceilings(report: Report) -> Table:
    table = Table(title="What the machine allows")
    table.add_column("ceiling")
    table.add_column("median, lowest-highest", justify="right")
    for name, figure in report.ceiling.items():
        table.add_row(name, _cell(figure, "{:,.2f}" if figure.high < 100 else "{:,.0f}"))
    for name, share in report.efficiency.items():
        table.add_row(f"we reach {name}", f"{100 * share:.1f} %")
    return table
