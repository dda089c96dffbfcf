"""The files of Slurm, Compose and Kubernetes, made of the parts of a run and the templates beside. Pure."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from engine.config import Config
from engine.deployment.hosts import BROKER, PORT, SUPERVISOR, Part, Site, parts
from engine.errors import ConfigError

MEETING_PORT = 29500
STORE = "/store"
_URL, _RANK, _MEETING = "@url@", "@rank@", "@meeting@"
_FIRST = {"server": "@first-of-server@", "learner": "@first-of-learner@"}
_OPTION = re.compile(r"[a-z][a-z-]*")


def slurm(config: Config, out: Path) -> dict[str, str]:
    """Return the batch script of a job that works in the directory of today. Raises ConfigError."""
    broker, work = out / "broker", Path.cwd()
    site = Site(
        programs=f"{Path(sys.executable).parent}/",
        work=str(work),
        recipe=str(out / "recipe.toml"),
        broker=str(broker),
        keys=str(broker / "seeds"),
        url=_URL,
        rank=_RANK,
        port=_MEETING,
        first=_FIRST,
    )
    found = list(parts(config, site))
    nodes, places = _nodes(found)
    stop = (f"{site.programs}spade", "stop", config.run.name, "--directory", config.run.directory)
    text = _template("job.sh.j2", shlex.quote).render(
        name=config.run.name,
        here=str(out),
        work=str(work),
        options=_options(config, found, out),
        port=config.bus.port or PORT,
        meeting=MEETING_PORT,
        stop=shlex.join(stop),
        nodes=nodes,
        places=places,
        firsts={name: places[name] for name in _FIRST if name in places},
        parts=[{**_of(part), "line": _line(part)} for part in found],
        environment={key: value for part in found for key, value in part.environment.items()},
        once=(BROKER, SUPERVISOR),
    )
    return {"job.sh": text}


def _nodes(found: list[Part]) -> tuple[int, dict[str, int]]:
    """Return how many nodes a job has, and the number of each part's first one.

    Broker and supervisor are on the first, which is theirs alone where the supervisor's roles have devices.
    """
    places, following = {}, 0
    for part in found:
        if part.name in (BROKER, SUPERVISOR):
            places[part.name] = 0
            following = int(bool(part.devices))
        else:
            places[part.name] = following
            following += part.hosts
    return max(1, following), places


def _line(part: Part) -> str:
    """Return a command line for bash, with the variables of the job."""
    line = shlex.join(part.command)
    variables = {_URL: "url", _MEETING: "meeting", _RANK: "SLURM_PROCID"}
    variables |= {mark: f"first_{name}" for name, mark in _FIRST.items()}
    for mark, variable in variables.items():
        line = line.replace(mark, f'"${variable}"')
    return line


def _options(config: Config, found: list[Part], out: Path) -> list[str]:
    """Return the options of sbatch: ours, under those of the recipe. Raises ConfigError."""
    devices = max((device for part in found for device in part.devices), default=-1) + 1
    options: dict[str, str | int | bool] = {"ntasks-per-node": 1, "exclusive": True, "mem": 0}
    options |= {"gpus-per-node": devices} if devices else {}
    options |= {"signal": f"B:TERM@{_grace(config)}", "output": f"{out}/job-%j.out"}
    for key, value in config.launch.slurm.items():
        if not _OPTION.fullmatch(key) or "\n" in str(value):
            raise ConfigError(
                f"launch.slurm.{key} = {value!r} is no option of sbatch.",
                remedy="Long options without dashes, on one line each: partition, time, account, mem.",
            )
        options[key] = value
    return [
        f"--{key}" if value is True else f"--{key}={shlex.quote(str(value))}"
        for key, value in options.items()
        if value is not False
    ]


def compose(config: Config, out: Path) -> dict[str, str]:
    """Return the Compose file of one machine. Raises ConfigError for parts that need several."""
    site = _container(config, f"nats://{BROKER}", "0", {name: name for name in _FIRST}, "/run/secrets")
    found = list(parts(config, site))
    problems = [
        f"launch.hosts.{part.name} = {part.hosts}: Compose starts containers on one machine" for part in found
        if part.hosts > 1 and (part.devices or part.name == "learner")
    ] + [
        f"{one.name} and {two.name} would share device {min(shared)}" for one, two in combinations(found, 2)
        if (shared := set(one.devices) & set(two.devices))
    ]  # fmt: skip
    if problems:
        raise ConfigError("\n".join(problems), remedy="Use other devices, or Slurm or Kubernetes.")
    files = sorted({file for part in found for file in part.files})
    user = f"{os.getuid()}:{os.getgid()}"
    template = _template("compose.yaml.j2", lambda value: json.dumps(value).replace("$", "$$"))
    return {"compose.yaml": template.render(**_shared(config, found), files=files, user=user)}


def kubernetes(config: Config, out: Path) -> dict[str, str]:
    """Return manifests, and the kustomization that makes secrets of the files beside them."""
    app = config.run.name.replace("_", "-").strip("-")
    first = {name: f"{app}-{name}-0.{app}" for name in _FIRST}
    site = _container(config, f"nats://{app}-{BROKER}-0.{app}", _RANK, first, "/run/spade")
    found = list(parts(config, site))
    values = _shared(config, found) | {
        "app": app,
        "storage": config.launch.storage_gb,
        "store": math.ceil(config.bus.store_gb) + 2,
    }
    return {
        name: _template(f"{name}.j2", _for_kubernetes).render(values)
        for name in ("run.yaml", "kustomization.yaml")
    }


def _for_kubernetes(value: Any) -> str:
    return json.dumps(value).replace("$(", "$$(").replace(_RANK, "$(JOB_COMPLETION_INDEX)")


def _container(config: Config, broker: str, rank: str, first: dict[str, str], keys: str) -> Site:
    return Site(
        programs="", work="/data", recipe="/spade/recipe.toml", broker=keys, keys=keys,
        url=f"{broker}:{config.bus.port or PORT}", rank=rank, first=first, port=str(MEETING_PORT),
    )  # fmt: skip


def _shared(config: Config, found: list[Part]) -> dict[str, Any]:
    """Return what the templates of containers have in common."""
    own = [{**_of(part), "environment": {"HOME": "/data", **part.environment}} for part in found]
    return {"name": config.run.name, "image": config.launch.image, "grace": _grace(config), "parts": own}


def _grace(config: Config) -> int:
    return int(config.run.drain_seconds) + 60


def _of(part: Part) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.structs.asdict(part)
    return {**values, "command": list(part.command)}


def _template(name: str, quote: Callable[[Any], str]) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("engine", "deployment"), undefined=jinja2.StrictUndefined,
        trim_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    environment.filters |= {"quoted": quote, "basename": lambda file: Path(file).name}
    environment.filters["under"] = lambda file, directory: directory + file
    return environment.get_template(name)
