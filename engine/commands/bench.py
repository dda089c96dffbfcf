"""``spade bench``: measurements that anybody can repeat. Each says how busy the machine was."""

from __future__ import annotations

import typer

app = typer.Typer(name="bench", help="Measure parts of the engine on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep subcommands by name even while there is only one."""
