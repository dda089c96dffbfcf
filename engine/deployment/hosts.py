"""A run on several hosts as data: its parts, and the recipe that all of them share. Pure.

The supervisor's host runs the broker and ``run.roles``; each role of ``launch.hosts`` is a part of its own.
Words that only the started job knows stand in the command lines as a :class:`Site` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bus.access import ADMIN
from bus.credentials import ACCOUNT, SEEDS, SUFFIX
from engine import placement, registry
from engine.checks.settings import check
from engine.config import Config
from engine.errors import ConfigError

BROKER, SUPERVISOR = "broker", "supervisor"
SETTINGS, CA = "server.conf", "ca.pem"
PORT = 4222
_NEEDED = ("designer", "agent", "scorer", "learner", "server")
_ONCE = ("scorer", "learner")
_SAMPLERS = ("designer", "agent", "evaluator")


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """The words of one kind of deployment.

    ``programs`` is a prefix of programs, ``work`` the working directory; then come the recipe, the
    directories of the broker's files and of the keys, the broker's URL, the rank of a host within its part,
    the address of a part's first host, and the port at which a learner's processes meet.
    """

    programs: str
    work: str
    recipe: str
    broker: str
    keys: str
    url: str
    rank: str
    first: dict[str, str]
    port: str


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One command, once on each of ``hosts`` hosts.

    ``environment`` says how it reaches the bus; ``files`` are the files of the broker's directory that it
    reads, ``devices`` the numbers of those it uses.
    """

    name: str
    command: tuple[str, ...]
    hosts: int = 1
    environment: dict[str, str] = {}
    files: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()


def recipe_of(config: Config) -> Config:
    """Return the recipe that the hosts read; servers that others sample from listen on all addresses.

    Raises ConfigError for hosts that cannot make up a run, and for a secret that would stand in a text.
    """
    _require(config)
    args = placement.arguments(config.server)
    if not config.launch.hosts or config.server.urls or "host" in args:
        return config
    server = msgspec.structs.replace(config.server, args={**config.server.args, "host": "0.0.0.0"})
    return msgspec.structs.replace(config, server=server)


def has_broker(config: Config) -> bool:
    """Return whether the run has a broker for all hosts: not one that is private, nor the recipe's."""
    return bool(config.launch.hosts) and not config.bus.url


def broker_settings(config: Config, store: str) -> str:
    """Return the configuration of that broker (docs/bus-security.md)."""
    table = config.bus
    return (
        f'listen: "0.0.0.0:{table.port or PORT}"\nmax_payload: {table.max_payload_mb}MB\n'
        f"jetstream {{ store_dir: {json.dumps(store)}, max_file: {int((table.store_gb + 1) * 2**30)}, "
        f'sync_interval: "{"always" if table.sync == "paranoid" else table.sync}" }}\n'
        f'accounts {{ include "{ACCOUNT}" }}\n'
    )


def parts(config: Config, site: Site) -> Iterator[Part]:
    """Yield the parts of a run: the broker unless the recipe names one, the supervisor, the other roles."""
    own, bus, hosts = has_broker(config), config.bus, config.launch.hosts
    keyed, nodes = own or bool(bus.credentials), placement.nodes(config.server)
    environment = {"SPADE_RUN": config.run.name}
    environment |= {"SPADE_BUS_CREDENTIALS": site.keys} if keyed else {}
    environment |= {"SPADE_BUS_CA": f"{site.broker}/{CA}"} if bus.ca else {}

    def part(name: str, *command: str, roles: tuple[str, ...], keys: tuple[str, ...], count: int = 1) -> Part:
        files = (*(f"{SEEDS}/{key}{SUFFIX}" for key in keys if keyed), *((CA,) if bus.ca else ()))
        devices = {device for _, found in placement.places(_only(config, *roles)) for device in found}
        return Part(
            name=name,
            command=command,
            hosts=count,
            environment=environment,
            files=files,
            devices=tuple(sorted(devices)),
        )

    if own:
        start = (f"{site.programs}nats-server", "-c", f"{site.broker}/{SETTINGS}")
        yield Part(name=BROKER, command=start, files=(SETTINGS, ACCOUNT))
    spade = f"{site.programs}spade"
    settings = {"bus.url": site.url} if own else {}
    settings |= {"bus.credentials": site.keys} if keyed else {}
    settings |= {"bus.ca": f"{site.broker}/{CA}"} if bus.ca else {}
    settings |= {"server.args.master-addr": site.first["server"]} if nodes > 1 else {}
    overrides = (f"{key}={value}" for key, value in settings.items())
    yield part(
        SUPERVISOR,
        spade,
        "run",
        site.recipe,
        *overrides,
        roles=config.run.roles,
        keys=(ADMIN, *config.run.roles),
    )
    directory = str(Path(site.work, config.run.directory, config.run.name))
    for role, count in hosts.items():
        program = _learner(config, site, count) if role == "learner" else [spade]
        words = (*program, "role", role, "--connect", bus.url or site.url, "--directory", directory)
        spread = role == "server" and nodes > 1
        yield part(role, *words, "--wait", "3600", count=1 if spread else count, roles=(role,), keys=(role,))
        for rank in range(1, nodes if spread else 1):
            place = (f"server.args.node-rank={rank}", f"server.args.master-addr={site.first[role]}")
            yield part(f"server-{rank}", spade, "workers", site.recipe, *place, roles=(role,), keys=())


def _learner(config: Config, site: Site, hosts: int) -> list[str]:
    """Return the learner's launcher, up to ``-m engine.cli``."""
    meeting = placement.Meeting(hosts, site.rank, site.first["learner"], site.port)
    words = placement.learner_launch(config, meeting)
    return [
        *(f"{site.programs}{word}" if word in placement.PROGRAMS else word for word in words),
        "-m",
        "engine.cli",
    ]


def _only(config: Config, *roles: str) -> Config:
    """Return the recipe as a host with ``roles`` reads it."""
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, roles=roles))


def _require(config: Config) -> None:
    table, roles = config.launch, config.run.roles
    for role in (*table.hosts, *roles):
        registry.load(registry.ROLES, role, where="launch.hosts")
    problems = [
        f"launch.hosts.{role} = {hosts} must be at least 1"
        for role, hosts in table.hosts.items()
        if hosts < 1
    ]
    problems += [
        f"launch.hosts.{role}: a run has one {role}, and run.roles has it" for role in _ONCE
        if role in table.hosts and role in roles
    ]  # fmt: skip
    if table.hosts.get("scorer", 1) > 1:
        problems.append("launch.hosts.scorer must be 1: a run has one scorer")
    problems += [
        f"no host has the role {role}: name it in run.roles or launch.hosts" for role in _NEEDED
        if role not in roles and role not in table.hosts
    ]  # fmt: skip
    for role in table.hosts:
        problems += [f"{key}, on the hosts of {role}: {text}" for key, text in check(_only(config, role))]
    nodes = placement.nodes(config.server)
    if nodes > 1 and table.hosts.get("server") != nodes:
        problems.append(
            f"server.args.nnodes = {nodes} needs launch.hosts.server = {nodes}, one server over all"
        )
    if config.bus.token or "@" in config.bus.url:
        problems.append(
            "bus.url and bus.token must hold no secret here: give roles keys (docs/bus-security.md)"
        )
    if problems:
        raise ConfigError("\n".join(problems))
