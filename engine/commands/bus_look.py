"""``spade bus top``, ``tail``, ``replay`` and ``dlq``: looking into a run's streams."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.busview.place import Place

dlq = typer.Typer(name="dlq", help="Dead letters: what no role could use.", no_args_is_help=True)

Run = Annotated[
    str | None, typer.Option("--run", "-r", help="Run, by name or path; the newest when left out.")
]
Directory = Annotated[Path, typer.Option(help="Where runs are.")]
Connect = Annotated[str, typer.Option(help="URL of a bus, in place of a run of this host.")]
Token = Annotated[str, typer.Option(envvar="SPADE_BUS_TOKEN", help="Token of that bus.")]
Credentials = Annotated[
    str,
    typer.Option(envvar="SPADE_BUS_CREDENTIALS", help="The supervisor's key for it, or a directory of keys."),
]
Ca = Annotated[str, typer.Option(envvar="SPADE_BUS_CA", help="Certificates to trust when it speaks TLS.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Stream = Annotated[str, typer.Option(help="EVENT, TASK, DESIGN, SAMPLE or DLQ.")]
Kind = Annotated[str, typer.Option(help="Only messages of this kind, for example design_rejected.")]
Tails = Annotated[list[str] | None, typer.Argument(help="Subjects after the run; * and > stand for any.")]
Numbers = Annotated[list[int] | None, typer.Argument(help="Numbers of letters, as `list` shows them.")]
All = Annotated[bool, typer.Option("--all", help="All letters there are now.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands in the group ``spade bus``."""
    app.command()(top)
    app.command()(tail)
    app.command()(replay)
    app.add_typer(dlq)


def top(
    run: Run = None,
    directory: Directory = Path("runs"),
    connect: Connect = "",
    token: Token = "",
    credentials: Credentials = "",
    ca: Ca = "",
    once: Annotated[bool, typer.Option("--once", help="Look twice, an interval apart, and end.")] = False,
    as_json: Json = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch streams, consumers and clients: depths, limits, rates, ages."""
    from engine.busview import shell

    place = _place(run, directory, connect, token, credentials, ca)
    _run(lambda: shell.top(place, once=once, as_json=as_json, interval=interval))


def tail(
    tails: Tails = None,
    run: Run = None,
    directory: Directory = Path("runs"),
    connect: Connect = "",
    token: Token = "",
    credentials: Credentials = "",
    ca: Ca = "",
    stream: Stream = "",
    kind: Kind = "",
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="How many old ones.")] = 20,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f", help="Wait for more.")] = False,
    as_json: Json = False,
) -> None:
    """Show the last messages, one a line; with --follow also those that come.

    The stream is EVENT unless a subject, a kind or --stream says otherwise.
    """
    from engine.busview import reading, shell

    wanted = reading.choose(stream, tails or (), kind)
    place = _place(run, directory, connect, token, credentials, ca)
    _run(lambda: shell.tail(place, wanted, count=count, follow=follow, as_json=as_json))


def replay(
    stream: Annotated[str, typer.Argument(help="Stream: EVENT, TASK, DESIGN, SAMPLE or DLQ.")],
    run: Run = None,
    directory: Directory = Path("runs"),
    connect: Connect = "",
    token: Token = "",
    credentials: Credentials = "",
    ca: Ca = "",
    first: Annotated[int, typer.Option("--from", min=1, help="First sequence.")] = 1,
    since: Annotated[str, typer.Option(help="Only what was stored within 30s, 15m, 2h, 3d.")] = "",
    last: Annotated[int | None, typer.Option("--to", min=1, help="Last sequence.")] = None,
    tail: Annotated[list[str] | None, typer.Option(help="Only these subjects (may be repeated).")] = None,
    kind: Kind = "",
    as_json: Json = False,
    frames: Annotated[
        bool, typer.Option("--frames", help="With --json: the stored bytes too (base64).")
    ] = False,
    into: Annotated[str, typer.Option(help="URL of another bus to publish them on.")] = "",
    into_run: Annotated[str, typer.Option(help="Run on that bus; the same name when left out.")] = "",
    into_token: Annotated[str, typer.Option(envvar="SPADE_INTO_TOKEN", help="Token of that bus.")] = "",
    into_credentials: Annotated[str, typer.Option(help="The supervisor's key for that bus.")] = "",
    into_ca: Annotated[str, typer.Option(help="Certificates to trust there.")] = "",
    republish: Annotated[
        bool, typer.Option("--republish", help="Publish them again where they are.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, say what would be published.")] = False,
) -> None:
    """Print stored messages, or publish them again under the same ids (--into, --republish)."""
    from engine.busview import reading, shell, words
    from engine.busview.place import Place

    if republish and into:
        raise ConfigError("--republish and --into exclude each other.")
    if as_json and (republish or into):
        raise ConfigError(
            "--json prints messages; --republish and --into publish them.", remedy="Choose one."
        )
    span = shell.Span(first, last, words.seconds_of(since) if since else None)
    wanted = reading.choose(stream, tail or (), kind)
    place = _place(run, directory, connect, token, credentials, ca)
    if republish or into:
        target = Place(into_run or None, url=into, token=into_token, credentials=into_credentials, ca=into_ca)
        _run(lambda: shell.resend(place, wanted, span, target if into else None, really=yes))
    else:
        _run(lambda: shell.replay(place, wanted, span, as_json=as_json, frames=frames))


@dlq.command("list")
def list_letters(
    run: Run = None,
    directory: Directory = Path("runs"),
    connect: Connect = "",
    token: Token = "",
    credentials: Credentials = "",
    ca: Ca = "",
    count: Annotated[int, typer.Option("-n", "--count", min=0, help="How many of the last ones.")] = 20,
    as_json: Json = False,
) -> None:
    """Show reasons with their counts, and the last letters. With --json: every letter."""
    from engine.busview import shell

    place = _place(run, directory, connect, token, credentials, ca)
    _run(lambda: shell.list_letters(place, count=count, as_json=as_json))


@dlq.command()
def show(
    number: Annotated[int, typer.Argument(help="Number of the letter.")],
    run: Run = None,
    directory: Directory = Path("runs"),
    connect: Connect = "",
    token: Token = "",
    credentials: Credentials = "",
    ca: Ca = "",
    as_json: Json = False,
) -> None:
    """Show one letter and the message in it."""
    from engine.busview import shell

    place = _place(run, directory, connect, token, credentials, ca)
    _run(lambda: shell.show_letter(place, number, as_json=as_json))


@dlq.command()
def retry(
    numbers: Numbers = None,
    run: Run = None,
    directory: Directory = Path("runs"),
    connect: Connect = "",
    token: Token = "",
    credentials: Credentials = "",
    ca: Ca = "",
    everything: All = False,
) -> None:
    """Publish letters again on their subjects; each is removed once its message is stored."""
    from engine.busview import shell

    _choice(numbers, everything)
    place = _place(run, directory, connect, token, credentials, ca)
    _run(lambda: shell.retry_letters(place, numbers or None))


@dlq.command()
def drop(
    numbers: Numbers = None,
    run: Run = None,
    directory: Directory = Path("runs"),
    connect: Connect = "",
    token: Token = "",
    credentials: Credentials = "",
    ca: Ca = "",
    everything: All = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove letters for good."""
    from engine.busview import shell

    _choice(numbers, everything)
    if not yes and not sys.stdin.isatty():
        raise ConfigError("Dropping letters asks first, and there is nobody to ask.", remedy="Add --yes.")
    place = _place(run, directory, connect, token, credentials, ca)
    _run(lambda: shell.drop_letters(place, numbers or None, ask=None if yes else typer.confirm))


def _choice(numbers: list[int] | None, everything: bool) -> None:
    if bool(numbers) == everything:
        raise ConfigError("Name letters by number, or take --all.", remedy="`spade bus dlq list` shows them.")


def _place(run: str | None, directory: Path, connect: str, token: str, credentials: str, ca: str) -> Place:
    from engine.busview.place import Place

    return Place(run, directory, url=connect, token=token, credentials=credentials, ca=ca)


def _run(work: Callable[[], Awaitable[None]]) -> None:
    """Run a command; a reader of our output that goes away ends it quietly."""
    import anyio

    from engine.telemetry import quiet_bus

    with quiet_bus(), _quiet_pipe():
        anyio.run(work, backend_options={"use_uvloop": True})


@contextmanager
def _quiet_pipe() -> Iterator[None]:
    from bus.scopes import only

    try:
        yield
        sys.stdout.flush()
    except BaseException as error:
        cause = only(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(cause, BrokenPipeError):
            raise
        # What is still buffered must not raise again as the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
