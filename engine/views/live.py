"""The view of a run in progress: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from engine.config import Config
from engine.records.status import RunStatus
from engine.text import clean, duration
from engine.views.overview import vendi

LINE_SECONDS = 10.0
SHOWN_AT_THE_END = "run.failed"
STALL_SECONDS = 120.0
_BARS = " ▁▂▃▄▅▆▇█"
_QUEUE_WORDS = ("queue", "waiting", "in_flight", "in_hand", "pending", "open_", "held")


class LiveView(Protocol):
    """Receives the status once per second, and messages to show at once."""

    def showing(self) -> AbstractContextManager[object]: ...

    def update(self, status: RunStatus, phase: str) -> None: ...

    def say(self, text: str) -> None: ...


def make(config: Config, console: Console, *, clock: Callable[[], float] = time.time) -> LiveView:
    """Return the view of ``ui.live``; ``auto`` is the panel when stdout is a terminal."""
    panel = config.ui.live == "on" or (config.ui.live == "auto" and console.is_terminal)
    return LivePanel(config, console, clock) if panel else Lines(config, console, clock)


def sink(view: LiveView) -> Callable[[str, MutableMapping[str, Any]], None]:
    """Return a log sink that shows warnings and errors in ``view``."""

    def show(level: str, event: MutableMapping[str, Any]) -> None:
        hidden = {"event", "level", "timestamp", "process", "host", "exc_info", "logger"}
        fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in hidden)
        if event.get("event") == SHOWN_AT_THE_END:
            return
        # a reason may hold text of a program
        view.say(clean(f"{level}: {event.get('event', '')} {fields}".rstrip()[:400]))

    return show


class Lines:
    """Prints one line per trained step or message, and one every ten seconds without news."""

    def __init__(self, config: Config, console: Console, clock: Callable[[], float]) -> None:
        self._config, self._console, self._clock = config, console, clock
        self._shown: tuple[object, ...] = ()
        self._at = 0.0

    def showing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def update(self, status: RunStatus, phase: str) -> None:
        key = (status.step, status.round, phase, len(status.evaluations))
        now = self._clock()
        if key != self._shown or now - self._at >= LINE_SECONDS:
            self._shown, self._at = key, now
            self.say(line(status, self._config, phase))

    def say(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(self._clock()))
        self._console.print(f"{stamp} {text}", markup=False, highlight=False, soft_wrap=True)


class LivePanel:
    """A panel that is redrawn in place; messages scroll above it."""

    def __init__(self, config: Config, console: Console, clock: Callable[[], float]) -> None:
        self._config, self._console, self._clock = config, console, clock
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def showing(self) -> AbstractContextManager[object]:
        return self._live

    def update(self, status: RunStatus, phase: str) -> None:
        self._live.update(panel(status, self._config, phase, self._clock()))

    def say(self, text: str) -> None:
        self._console.print(Text(text))


def line(status: RunStatus, config: Config, phase: str) -> str:
    """Return a status as one line of text."""
    summary = status.summary or {}
    parts = [
        phase,
        f"step {status.step}",
        f"round {_rounds(status, config)}/{config.run.steps}",
        f"left {_left(status, config)}",
        f"envs {_live_environments(status)}",
        f"valid {_share(status.valid_share)}",
        f"plain {_number(summary.get('plain'))}",
        f"hinted {_number(summary.get('hinted'))}",
        f"regret {_number(status.regret)}",
        f"vendi {vendi(status)}",
        f"tok/s {status.tokens_per_second:.0f}",
        f"age<={status.max_staleness_seen}",
    ]
    parts += [
        f"{item.suite} {item.win:.3f}±{1.96 * item.stderr:.3f}@{item.step}" for item in status.evaluations
    ]
    return "  ".join(parts)


def panel(status: RunStatus, config: Config, phase: str, now: float) -> RenderableType:
    """Return the panel of a status: progress and versions, returns and validity, queues, suites."""
    blocks: list[RenderableType] = [_overview(status, config), _queues(status)]
    if status.evaluations:
        blocks.append(_suites(status))
    stalled = status.last_event_at is not None and now - status.last_event_at > STALL_SECONDS
    if stalled and status.last_event_at is not None:
        blocks.append(Text(f"no event for {now - status.last_event_at:.0f} s", style="yellow"))
    if status.stale_roles:
        blocks.append(Text(f"silent roles: {', '.join(status.stale_roles)}", style="yellow"))
    return Panel(Group(*blocks), title=f"spade {config.run.name} · {phase}", title_align="left")


def histogram(counts: list[int] | tuple[int, ...]) -> str:
    """Return counts as a row of bars; the highest is full."""
    top = max(counts, default=0)
    if not top:
        return ""
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // top)] for count in counts)


def _overview(status: RunStatus, config: Config) -> Table:
    summary = status.summary or {}
    table = Table.grid(padding=(0, 3))
    failed = sum(status.episodes_failed.values())
    alive = [server.version for server in status.servers if server.lost is None]
    serving = ", ".join(alive or map(str, status.versions_serving)) or "none yet"
    episodes = f"{status.episodes_finished:,} (failed {failed})"
    bars = histogram(summary.get("win_histogram") or ())
    living = f"{_live_environments(status)} live, {status.environments_accepted} written"
    rows = [
        ("step", str(status.step), "round", f"{_rounds(status, config)} of {config.run.steps}"),
        ("published", status.version_published_label or "none yet", "serving", serving),
        ("seconds per round", _number(status.round_seconds), "left", _left(status, config)),
        ("environments", living, "valid", _share(status.valid_share)),
        ("plain return", _number(summary.get("plain")), "hinted return", _number(summary.get("hinted"))),
        ("regret", _number(status.regret), "in band", _share(summary.get("in_band"))),
        ("win rates 0..1", bars, "gradient", _share(summary.get("gradient_share"))),
        (
            "Vendi score",
            vendi(status),
            "duplicates",
            _share((status.diversity or {}).get("near_duplicates")),
        ),
        ("tokens/s", f"{status.tokens_per_second:,.0f}", "episodes", episodes),
        ("staleness max", str(status.max_staleness_seen), "mean, last batch", _number(status.mean_staleness)),
    ]
    for left, a, right, b in rows:
        table.add_row(Text(left, style="dim"), a, Text(right, style="dim"), b)
    return table


def _queues(status: RunStatus) -> Text:
    parts = []
    for name, gauges in status.gauges.items():
        depths = [
            f"{key} {value:g}"
            for key, value in sorted(gauges.items())
            if value and not key.endswith("_ms") and any(word in key for word in _QUEUE_WORDS)
        ]
        if depths:
            parts.append(f"{name.split('/')[0]}: {', '.join(depths[:4])}")
    return Text("queues  " + ("   ".join(parts) or "empty"), style="dim", overflow="ellipsis", no_wrap=True)


def _suites(status: RunStatus) -> Table:
    table = Table.grid(padding=(0, 3))
    for item in status.evaluations:
        table.add_row(
            Text(f"held-out {item.suite}", style="dim"),
            f"{item.win:.3f} ± {1.96 * item.stderr:.3f}",
            f"at step {item.step}",
        )
    return table


def _live_environments(status: RunStatus) -> int:
    return max(status.environments_accepted - status.environments_scored, 0)


def _rounds(status: RunStatus, config: Config) -> int:
    """Return the trained rounds; the last batch of a run flushes windows and is no round with episodes."""
    return min(status.rounds, config.run.steps)


def _left(status: RunStatus, config: Config) -> str:
    """Return the estimated time to the end of the run."""
    if status.round_seconds is None:
        return "-"
    return duration((config.run.steps - _rounds(status, config)) * status.round_seconds)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
