"""``spade bus``: prepare a broker for a run, look into it."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    name="bus", help="Prepare a broker for runs, look into a run's streams.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    """Keep subcommands by name even while there is only one."""


@app.command()
def provision(
    run: Annotated[str, typer.Option(help="Run, as in run.name.", show_default=False)],
    url: Annotated[str, typer.Option(help="URL of the broker.", show_default=False)],
    token: Annotated[str, typer.Option(envvar="SPADE_BUS_TOKEN", help="Token of the broker.")] = "",
    store_gb: Annotated[float, typer.Option(help="What the streams of the run share.")] = 16.0,
) -> None:
    """Create or update the streams and consumers of a run."""
    import anyio

    from bus import provision as create

    async def work() -> None:
        await create(url, run=run, token=token, store_gb=store_gb)

    anyio.run(work)
    print(f"The streams of run {run} are ready at {url}.")
