"""``spade bus``: looks into a run's streams, prepares a broker for a run."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.commands.bus_provision import provision
from engine.errors import ConfigError, SpadeError
from engine.text import clean, shorten

if TYPE_CHECKING:
    from bus import Bus

app = typer.Typer(
    name="bus", help="Look into a run's streams, prepare a broker for runs.", no_args_is_help=True
)
dlq = typer.Typer(name="dlq", help="Dead letters: messages that no role could use.", no_args_is_help=True)
app.command()(provision)
app.add_typer(dlq)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Count = Annotated[int, typer.Option("-n", "--count", min=0, help="Number of stored ones to show.")]


def _options(
    run: Annotated[
        str | None, typer.Option("--run", "-r", help="Run, by name or path; default: the newest.")
    ] = None,
    directory: Annotated[Path, typer.Option(help="Directory of the runs.")] = Path("runs"),
    connect: Annotated[str, typer.Option(help="URL of a bus, in place of a run of this host.")] = "",
    token: Annotated[str, typer.Option(envvar="SPADE_BUS_TOKEN", help="Token of that bus.")] = "",
    credentials: Annotated[
        str,
        typer.Option(envvar="SPADE_BUS_CREDENTIALS", help="The supervisor's key, or a directory of keys."),
    ] = "",
    ca: Annotated[str, typer.Option(envvar="SPADE_BUS_CA", help="Certificates to trust with TLS.")] = "",
) -> None:
    """Hold the options of every command that looks into a bus."""


def on_bus(command: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Turn ``command`` into a function without its first parameter and with the options of a bus."""
    shared = inspect.signature(_options, eval_str=True).parameters
    own = list(inspect.signature(command, locals={"Bus": Any}, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        import anyio

        from engine.busview.attach import attached
        from engine.running.supervisor import Address
        from engine.telemetry import quiet_bus

        run, directory, url, token, credentials, ca = (values.pop(name) for name in shared)
        given = Address(url, token, run or "", credentials, ca) if url else None

        async def work() -> None:
            async with attached(run, directory, given) as bus:
                await command(bus, **values)

        with quiet_bus(), _broken_pipe_ends_quietly():
            anyio.run(work, backend_options={"use_uvloop": True})

    parameters = [*own, *shared.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


@app.command()
@on_bus
async def tail(
    bus: Bus,
    subjects: Annotated[
        list[str] | None, typer.Argument(help="Subjects after the run; * and > are wildcards.")
    ] = None,
    stream: Annotated[str, typer.Option(help="EVENT, TASK, SAMPLE or DLQ; default: EVENT.")] = "",
    kind: Annotated[str, typer.Option(help="Only messages of this kind, such as design_rejected.")] = "",
    count: Count = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the last messages of a stream, one per line."""
    from engine.busview.stored import DecodedMessage, StreamSelection, following, newest

    wanted = StreamSelection.of(stream, subjects or (), kind)

    def show(message: DecodedMessage) -> None:
        _print(message.record() if as_json else message.line())

    found, last = await newest(bus, wanted, count)
    for message in found:
        show(message)
    if not found and not follow:
        print(f"No message of stream {wanted.stream} matches.", file=sys.stderr)
    if follow:
        async for message in following(bus, wanted, last):
            show(message)


@app.command()
@on_bus
async def top(
    bus: Bus,
    once: Annotated[bool, typer.Option("--once", help="Print one screen, then end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Show streams and consumers: depths, limits, rates, ages. Repeats until Ctrl-C without --once."""
    import anyio
    from rich.console import Console

    from engine.busview import depths

    console, before = Console(), await depths.read(bus)
    while True:
        await anyio.sleep(interval)
        now = await depths.read(bus)
        figures, before = depths.compare(now, before), now
        if as_json:
            _print(figures)
        else:
            console.print(depths.table(figures))
        if once:
            return


@dlq.command("list")
@on_bus
async def list_letters(bus: Bus, count: Count = 20, as_json: AsJson = False) -> None:
    """Show the reasons with their counts, and the last letters; with --json every letter."""
    from engine.busview.dead_letters import grouped, stored_letters

    letters = [one async for one in stored_letters(bus)]
    if as_json:
        for one in letters:
            _print(one.record())
        return
    _print(f"{len(letters)} dead letters")
    for number, last in grouped(letters):
        _print(f"{number:>8}  {last.letter.source} {last.message.kind}  {shorten(last.reason, 120)}")
    for one in letters[len(letters) - min(count, len(letters)) :]:
        what = f"{one.letter.source} {one.letter.sequence}  {one.message.kind}  {one.letter.subject}"
        _print(f"{one.number:>8}  {what}  tried {one.letter.attempts}x  {shorten(one.reason, 120)}")


@dlq.command()
@on_bus
async def show(
    bus: Bus,
    number: Annotated[int, typer.Argument(help="Number of the letter.")],
    as_json: AsJson = False,
) -> None:
    """Show one letter and the message in it."""
    from engine.busview.dead_letters import stored_letters

    async for one in _existing(stored_letters(bus, [number])):
        record = one.record() | {"obstacle": one.obstacle(), "message": one.message.record()}
        _print(record if as_json else json.dumps(record, indent=2, ensure_ascii=False))


@dlq.command()
@on_bus
async def replay(
    bus: Bus,
    numbers: Annotated[list[int] | None, typer.Argument(help="Numbers of letters, see `list`.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All letters.")] = False,
) -> None:
    """Publish letters again on their subjects; each is removed once its message is stored."""
    from bus import BusError
    from engine.busview import dead_letters

    if bool(numbers) == everything:
        raise ConfigError("Name letters by number, or take --all.", remedy="`spade bus dlq list` shows them.")
    done, failed = 0, list[str]()
    letters = [one async for one in _existing(dead_letters.stored_letters(bus, numbers or ()))]
    for letter in letters:
        try:
            await dead_letters.replay(bus, letter)
            done += 1
        except BusError as error:
            failed.append(error.what)
    _print(f"{done} letters were published again.")
    if failed:
        raise SpadeError(f"{'; '.join(failed).capitalize()}.", remedy="`spade bus dlq show N` has details.")


async def _existing(letters: Any) -> Any:
    """Turn a letter that does not exist into bad input (exit status 2)."""
    from bus import NotFound

    try:
        async for one in letters:
            yield one
    except NotFound as error:
        raise ConfigError(f"{error.what.capitalize()}.", remedy=error.remedy) from error


def _print(what: str | dict[str, Any]) -> None:
    """Print one line at once."""
    print(clean(what) if isinstance(what, str) else json.dumps(what), flush=True)


@contextmanager
def _broken_pipe_ends_quietly() -> Iterator[None]:
    """End without an error when the reader of the output goes away (``| head``), or on Ctrl-C."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, KeyboardInterrupt):
        # Output that is still buffered must not raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
