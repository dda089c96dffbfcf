"""``spade bus``: prepare a broker for a run, look into it."""

from __future__ import annotations

import typer

from engine.commands import bus_look, bus_provision

app = typer.Typer(
    name="bus", help="Prepare a broker for runs, look into a run's streams.", no_args_is_help=True
)


bus_provision.add_to(app)
bus_look.add_to(app)
