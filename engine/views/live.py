"""The view of a run in progress: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from engine.config import RunConfig, UiConfig
from engine.records.status import RunStatus
from engine.text import clean, duration, number, share
from engine.views.overview import LIVING, figures, vendi
from engine.views.pipeline import depths

LINE_SECONDS = 10.0
SHOWN_AT_THE_END = "run.failed"


class LiveView(Protocol):
    """Receives the status once per second, and messages to show at once."""

    def showing(self) -> AbstractContextManager[object]: ...

    def update(self, status: RunStatus, phase: str) -> None: ...

    def say(self, text: str) -> None: ...


def make(
    run: RunConfig, ui: UiConfig, console: Console, *, clock: Callable[[], float] = time.time
) -> LiveView:
    """Return the view of ``ui.live``; ``auto`` is the panel when stdout is a terminal."""
    panel = ui.live == "on" or (ui.live == "auto" and console.is_terminal)
    return LivePanel(run, console) if panel else Lines(run, console, clock)


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


def kind_of(phase: str) -> str:
    """Return a phase without the counts in it."""
    return phase.partition(" ")[0]


class Phases:
    """Tells how long a phase before the first round, or a drain, lasts."""

    def __init__(self) -> None:
        self._kind, self._begun = "", 0.0

    def timed(self, phase: str, now: float) -> str:
        """Return ``phase`` with its seconds so far; rounds have times of their own."""
        if kind_of(phase) != self._kind:
            self._kind, self._begun = kind_of(phase), now
        return phase if self._kind in LIVING else f"{phase} ({duration(now - self._begun)})"


class Lines:
    """Prints one line per trained step or message, and one every ten seconds without news."""

    def __init__(self, run: RunConfig, console: Console, clock: Callable[[], float]) -> None:
        self._run, self._console, self._clock = run, console, clock
        self._phases = Phases()
        self._shown: tuple[object, ...] = ()
        self._at = 0.0

    def showing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def update(self, status: RunStatus, phase: str) -> None:
        now = self._clock()
        shown = self._phases.timed(phase, now)
        key = (status.step, status.round, kind_of(phase), len(status.evaluations))
        if key != self._shown or now - self._at >= LINE_SECONDS:
            self._shown, self._at = key, now
            self.say(line(status, self._run, shown))

    def say(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(self._clock()))
        self._console.print(f"{stamp} {text}", markup=False, highlight=False, soft_wrap=True)


class LivePanel:
    """A panel that is redrawn in place; messages scroll above it."""

    def __init__(self, run: RunConfig, console: Console) -> None:
        self._run, self._console = run, console
        self._phases = Phases()
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def showing(self) -> AbstractContextManager[object]:
        return self._live

    def update(self, status: RunStatus, phase: str) -> None:
        self._live.update(panel(status, self._run, self._phases.timed(phase, time.time())))

    def say(self, text: str) -> None:
        self._console.print(Text(text))


def line(status: RunStatus, run: RunConfig, phase: str) -> str:
    """Return a status as one line of text."""
    summary = status.summary or {}
    parts = [
        phase,
        f"step {status.step}",
        f"round {_rounds(status, run)}/{run.steps}",
        f"left {_left(status, run)}",
        f"envs {status.environments_accepted}",
        f"valid {share(status.valid_share)}",
        f"plain {number(summary.get('plain'))}",
        f"hinted {number(summary.get('hinted'))}",
        f"regret {number(status.regret)}",
        f"vendi {vendi(status)}",
        f"tok/s {status.tokens_per_second:.0f}",
        f"age<={status.max_staleness_seen}",
    ]
    parts += [
        f"{item.suite} {item.win:.3f}±{1.96 * item.stderr:.3f}@{item.step}" for item in status.evaluations
    ]
    return "  ".join(parts)


def panel(status: RunStatus, run: RunConfig, phase: str) -> RenderableType:
    """Return the panel of a status: the figures of ``spade status`` in two columns, and what waits."""
    rows = figures(status)
    half = -(-len(rows) // 2)
    table = Table.grid(padding=(0, 3))
    for left, right in zip_longest(rows[:half], rows[half:], fillvalue=("", "")):
        table.add_row(
            Text(left[0], style="dim"), Text(str(left[1])), Text(right[0], style="dim"), Text(str(right[1]))
        )
    rounds = f"round {_rounds(status, run)} of {run.steps} · {_left(status, run)} left"
    title = f"spade {run.name} · {phase} · {rounds}"
    # The terminal echoes ^C into the empty line; after a full line it would shift what is drawn next.
    return Group(Panel(Group(table, _queues(status)), title=title, title_align="left"), "")


def _queues(status: RunStatus) -> Text:
    waiting = ", ".join(f"{name} {depth:g}" for name, depth in depths(status).items() if depth)
    return Text(f"waiting  {waiting or 'nothing'}", style="dim")


def _rounds(status: RunStatus, run: RunConfig) -> int:
    """Return the trained rounds; the last batch of a run flushes windows and is no round with episodes."""
    return min(status.rounds, run.steps)


def _left(status: RunStatus, run: RunConfig) -> str:
    """Return the estimated time to the end of the run."""
    if status.round_seconds is None:
        return "-"
    return duration((run.steps - _rounds(status, run)) * status.round_seconds)
