"""``spade launch``: what starts a run by Slurm, Compose or Kubernetes; ``spade workers`` serves in it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.errors import ConfigError
from engine.shipped import recipe_path

if TYPE_CHECKING:
    from engine.config import Config

_ENVIRONMENT = "# Read by all parts, for keys of endpoints and hubs: one NAME=VALUE a line\n"
_START = {
    "slurm": "sbatch {}/job.sh",
    "compose": "docker compose --project-directory {} up -d",
    "kubernetes": "kubectl apply -k {}",
}
Recipe = Annotated[
    Path,
    typer.Argument(parser=recipe_path, metavar="RECIPE", help="Recipe, by name or file.", show_default=False),
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides, such as launch.hosts.server=2.")]
Out = Annotated[Path | None, typer.Option(help="Directory of the files; default: RUN-TARGET.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the files; write nothing.")]


def launch(
    target: Annotated[
        Literal["slurm", "compose", "kubernetes"], typer.Argument(help="What starts it.", show_default=False)
    ],
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    dry_run: DryRun = False,
) -> None:
    """Write the files that start a run on a cluster or in containers, from the placement of its recipe.

    Keys of roles are written into files beside them, for their owner alone; existing ones stay.
    """
    from engine import recipe as recipes
    from engine.deployment import hosts, render

    config = hosts.recipe_of(recipes.load(recipe, overrides or []).config)
    place = (out or Path(f"{config.run.name}-{target}")).expanduser().resolve()
    targets = {"slurm": render.slurm, "compose": render.compose, "kubernetes": render.kubernetes}
    files = targets[target](config, place)
    if hosts.has_broker(config):
        store = str(place / "broker" / "store") if target == "slurm" else render.STORE
        files[f"broker/{hosts.SETTINGS}"] = hosts.broker_settings(config, store)
    if dry_run:
        print("\n".join(f"--- {name}\n{text}" for name, text in files.items()))
        return
    _write(place, {**files, "recipe.toml": recipes.dump(config)}, config)
    print(f"The files are in {place}. Start the run:\n{_START[target].format(shlex.quote(str(place)))}")


def _write(place: Path, files: dict[str, str], config: Config) -> None:
    """Write the files and the keys. Raises ConfigError where that is not possible."""
    from bus import BusError
    from bus.access import ADMIN
    from bus.credentials import SUFFIX, read_seed, seed_file, write_account, write_private
    from engine.deployment import hosts

    broker, table = place / "broker", config.bus
    try:
        for directory in (broker / "store", broker / "seeds", place / "data"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hosts.has_broker(config):
            write_account(config.run.name, broker, (*config.run.roles, *config.launch.hosts))
        elif table.credentials:
            for role in (ADMIN, *config.run.roles, *config.launch.hosts):
                seed = read_seed(seed_file(table.credentials, role))
                write_private(broker / "seeds" / f"{role}{SUFFIX}", f"{seed}\n")
        if table.ca:
            files[f"broker/{hosts.CA}"] = Path(table.ca).expanduser().read_text()
        if not (place / "environment").exists():
            files["environment"] = _ENVIRONMENT
        for name, text in files.items():
            write_private(place / name, text)
    except (OSError, BusError) as error:
        raise ConfigError(f"The files cannot be written to {place}: {error}") from error


def workers(recipe: Recipe, overrides: Overrides = None) -> None:
    """Run the workers of a server that spans hosts (server.args.nnodes) on one that is not its first.

    Overrides name its server.args.node-rank, and server.args.master-addr, the address of the first.
    """
    from engine import models
    from engine import recipe as recipes
    from engine.inference import launch as server

    config = recipes.load(recipe, overrides or []).config
    words = server.headless(config, models.resolve(config, Path(config.run.directory) / config.run.name))
    os.execve(words[0], words, server.environment(config))
