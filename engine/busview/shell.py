"""What the commands do: open a bus, look, print. Raise SpadeError or BusError for what a person must know."""

from __future__ import annotations

import base64
import json
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import anyio
import msgspec
from rich.console import Console
from rich.live import Live

from bus import BusError, NatsBus, NotFound
from bus.reads import Stored
from bus.scopes import flat_task_group
from engine.busview import letters, reading, show, words
from engine.busview.figures import Sample, Top, compare
from engine.busview.letters import Group, Letter
from engine.busview.place import Place, joined, opened
from engine.busview.probe import Probe, probing
from engine.busview.reading import Filter
from engine.busview.resend import Sent, send_again
from engine.busview.show import View
from engine.busview.table import WIDE, screen
from engine.errors import SpadeError

TOLD_EVERY = 1000


class Span(NamedTuple):
    """Sequences ``first`` .. ``last`` (None: the end), and not older than ``since`` seconds (None: any)."""

    first: int = 1
    last: int | None = None
    since: float | None = None


async def until_signal(work: Callable[[], Awaitable[None]]) -> None:
    """Run what would never end until SIGINT or SIGTERM comes; that is a good end."""
    async with flat_task_group() as tasks:

        async def watch() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    tasks.cancel_scope.cancel()
                    return

        tasks.start_soon(watch)
        await work()
        tasks.cancel_scope.cancel()


def say(text: str) -> None:
    """Print one line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print one line that is no output."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def dump(record: Any) -> str:
    """Return JSON on one line, in ASCII."""
    return json.dumps(record, separators=(", ", ": "))


# top


async def top(place: Place, *, once: bool, as_json: bool, interval: float) -> None:
    """Look again and again (in a terminal, or as JSON lines), or for one interval."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, WIDE))
    once = once or not (as_json or console.is_terminal)

    async def work() -> None:
        async with opened(place) as place_open, probing(place_open.bus) as probe:
            looks = _looks(probe, interval, live=place_open.live)
            if once or as_json:
                await _print_looks(looks, console, once=once, as_json=as_json)
            else:
                with Live(console=console, auto_refresh=False) as live:
                    async for figures in looks:
                        live.update(screen(figures, console.width), refresh=True)

    await until_signal(work)


async def _looks(probe: Probe, interval: float, *, live: bool) -> AsyncIterator[Top]:
    """Yield figures, the first ones without rates."""
    before: Sample | None = None
    while True:
        sample = await probe.sample()
        yield compare(sample, before, live=live)
        before = sample
        await anyio.sleep(interval)


async def _print_looks(looks: AsyncIterator[Top], console: Console, *, once: bool, as_json: bool) -> None:
    async for figures in looks:
        if figures.interval_s is None:
            continue
        if as_json:
            say(dump(msgspec.to_builtins(figures)))
        else:
            console.print(screen(figures, console.width))
        if once:
            return


# tail and replay


async def tail(place: Place, wanted: Filter, *, count: int, follow: bool, as_json: bool) -> None:
    """Print the last messages, then those that come when ``follow``."""
    width = Console().width if sys.stdout.isatty() else 0

    def out(seen: View) -> None:
        say(dump(show.record(seen)) if as_json else show.line(seen, time.time(), width=width))

    async def work() -> None:
        async with opened(place) as place_open:
            found, last = await reading.newest(place_open.bus, wanted, count)
            for seen in found:
                out(seen)
            if follow:
                async for seen in reading.following(place_open.bus, wanted, last):
                    out(seen)

    if follow:
        await until_signal(work)
    else:
        await work()


async def _chosen(bus: NatsBus, wanted: Filter, span: Span) -> tuple[int, int]:
    """Return the sequences that a span means now."""
    info = await bus.stream_info(wanted.stream)
    first, last = max(span.first, info.first), info.last if span.last is None else min(span.last, info.last)
    if span.since is not None:
        first = max(first, await reading.sequence_at(bus, wanted.stream, time.time() - span.since))
    return first, last


async def replay(place: Place, wanted: Filter, span: Span, *, as_json: bool, frames: bool) -> None:
    """Print what is stored."""
    async with opened(place) as place_open:
        bus = place_open.bus
        async for stored, seen in reading.between(bus, wanted, *await _chosen(bus, wanted, span)):
            if as_json:
                extra = {"frame": base64.b64encode(stored.frame).decode()} if frames else {}
                sys.stdout.write(f"{dump(show.record(seen) | extra)}\n")
            else:
                sys.stdout.write(f"{show.line(seen, time.time())}\n")


async def resend(place: Place, wanted: Filter, span: Span, target: Place | None, *, really: bool) -> None:
    """Publish what is stored again: on the bus ``target``, on its own when None. Without ``really`` only
    say how much that is.
    """
    async with AsyncExitStack() as stack:
        source = (await stack.enter_async_context(opened(place))).bus
        goal = source
        if target is not None:
            run = target.run or source.run
            goal = await stack.enter_async_context(joined(target.url, run, target.login()))
        first, last = await _chosen(source, wanted, span)
        found = reading.between(source, wanted, first, last)
        where = f"{wanted.stream} of run {goal.run} at {goal.connection.url}"
        if not really:
            count, size = await _weigh(found)
            say(f"{count:,} messages ({words.size(size)}) would go to {where}. Add --yes to publish them.")
            return
        sent = Sent()
        try:
            await send_again(found, source, goal, wanted.stream, sent, _tell)
        except BusError as error:
            raise SpadeError(
                f"Stopped after sequence {sent.last}, {sent.stored:,} messages were stored: {error.what}.",
                remedy=f"{error.remedy} Go on with --from {sent.last + 1}.".strip(),
            ) from error
        say(
            f"{sent.stored:,} messages ({words.size(sent.bytes)}) were stored in {where}; "
            f"{sent.known:,} were known there already."
        )


def _tell(sent: Sent) -> None:
    if (sent.stored + sent.known) % TOLD_EVERY == 0:
        note(f"{sent.stored + sent.known:,} messages, up to sequence {sent.last}")


async def _weigh(found: AsyncIterator[tuple[Stored, View]]) -> tuple[int, int]:
    count = size = 0
    async for stored, _ in found:
        count, size = count + 1, size + len(stored.frame)
    return count, size


# dead letters


async def list_letters(place: Place, *, count: int, as_json: bool) -> None:
    """Print groups and the last letters, or every letter as JSON."""
    async with opened(place) as place_open:
        if as_json:
            async for letter in letters.every(place_open.bus):
                say(dump(letter.record()))
            return
        kept: deque[Letter] = deque(maxlen=count)
        grouping = letters.Grouping()
        async for letter in letters.every(place_open.bus):
            grouping.add(letter)
            kept.append(letter.light())
    if not grouping.count:
        say("There are no dead letters.")
        return
    say(f"{grouping.count:,} dead letters")
    for group in grouping.groups():
        say(_group_line(group))
    if kept:
        say("")
    for letter in kept:
        say(_letter_line(letter))


def _group_line(group: Group) -> str:
    what = " ".join(part for part in (group.source, group.kind) if part) or "?"
    age = words.span(time.time() - group.last_at)
    return f"{group.count:>8,}  {what}  {words.cut(group.reason, 120)}  (last {group.number}, {age} ago)"


def _letter_line(letter: Letter) -> str:
    when = words.moment(letter.at, time.time())
    if letter.damaged is not None:
        return f"{letter.number:>8}  {when}  DAMAGED  {words.cut(letter.damaged, 120)}"
    what = letter.kind or "no message"
    return words.plain(
        f"{letter.number:>8}  {when}  {letter.source} {letter.sequence}  {what}  {letter.subject}  "
        f"tried {letter.attempts}x  {words.cut(letter.reason, 120)}"
    )


async def show_letter(place: Place, number: int, *, as_json: bool) -> None:
    """Print one letter with its message."""
    async with opened(place) as place_open:
        letter = await letters.find(place_open.bus, number)
    inner = show.view(
        letter.source or "DLQ",
        Stored(letter.sequence, letter.subject, letter.frame, letter.id, letter.at),
    )
    message = show.record(inner)
    record = letter.record() | {"obstacle": letters.obstacle(letter), "message": message}
    if as_json:
        say(dump(record))
        return
    for name, value in record.items():
        if name == "message":
            say("message")
            for line in json.dumps(value, indent=2, ensure_ascii=False).split("\n"):
                say(words.plain(line))
        elif value not in (None, ""):
            text = words.moment(value, time.time()) if name == "at" else value
            say(words.plain(f"{name:<10}{text}"))


async def retry_letters(place: Place, numbers: Sequence[int] | None) -> None:
    """Try letters again. Raises SpadeError in the end when some could not be."""
    done = known = 0
    failed: list[str] = []
    async with opened(place) as place_open:
        bus = place_open.bus
        async for letter in _found(bus, numbers, failed):
            try:
                stored = await letters.retry(bus, letter)
            except BusError as error:
                failed.append(error.what)
                continue
            done += stored
            known += not stored
    say(f"{done:,} letters were published again{f', {known:,} had been before' if known else ''}.")
    _complain(failed)


async def drop_letters(
    place: Place, numbers: Sequence[int] | None, *, ask: Callable[[str], bool] | None
) -> None:
    """Remove letters; ``ask`` is asked first."""
    failed: list[str] = []
    dropped = 0
    async with opened(place) as place_open:
        chosen = [one.light() async for one in _found(place_open.bus, numbers, failed)]
        if chosen and (
            ask is None or ask(f"Drop {len(chosen):,} letters of run {place_open.bus.run} for good?")
        ):
            for letter in chosen:
                dropped += await letters.drop(place_open.bus, letter)
    say(f"{dropped:,} letters were dropped.")
    _complain(failed)


async def _found(bus: NatsBus, numbers: Sequence[int] | None, failed: list[str]) -> AsyncIterator[Letter]:
    """Yield the letters with these numbers (None: all there are now); those that are not there ``failed``."""
    if numbers is None:
        async for letter in letters.every(bus):
            yield letter
        return
    for number in dict.fromkeys(numbers):
        try:
            yield await letters.find(bus, number)
        except NotFound as error:
            failed.append(error.what)


def _complain(failed: Sequence[str]) -> None:
    if failed:
        more = f" ({len(failed) - 3:,} more)" if len(failed) > 3 else ""
        raise SpadeError(
            f"{'; '.join(failed[:3]).capitalize()}{more}.", remedy="`spade bus dlq list` shows what is there."
        )
