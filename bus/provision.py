"""Creating and updating the streams, buckets and durables of a run. No other code creates them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bus.access import ADMIN, consumers_of
from bus.connection import ApiError, Connection, open_connection
from bus.errors import BusError, NotFound
from bus.subjects import STREAMS, Consumer, Names, consumer_config, stream_config

_NO_ROOM = 10047
_TOO_FEW = frozenset({10005, 10074})
# The bytes of a stream are an estimate of the server; it refuses a bound below what lies in it.
_FULL, _ROOM = 1.02, 1 << 16
# A cluster that has just been started answers for none of its streams at first.
_PATIENCE_SECONDS = 60.0


async def provision(
    url: str,
    *,
    run: str,
    token: str = "",
    seed_file: Path | str | None = None,
    tls: Path | str | None = None,
    replicas: int | None = None,
    store_gb: float = 16.0,
    max_payload_mb: int = 0,
    roles: Iterable[str] = (),
) -> None:
    """Create what is missing and bring what exists up to date; running it again changes nothing.

    ``store_gb`` is what the streams share, ``replicas`` on how many servers of a cluster each lies (None:
    one, or as many as now). ``max_payload_mb`` is the largest message that the run may send: a server that
    announces less is refused (0: any). ``roles`` are those of the run: each one of your own gets a queue
    (``task.ROLE.>``). A login with a key needs the supervisor's. A stream is never made smaller than what
    lies in it.

    Raises BusError when the server refuses: a store or a message limit that is too small, too few servers, an
    incompatible stream.
    """
    names, store = Names(run), int(store_gb * (1 << 30))
    kept = {} if replicas is None else {"num_replicas": replicas}
    async with open_connection(
        url, name=f"spade.{run}.provision", role=ADMIN, token=token, seed_file=seed_file, tls=tls
    ) as connection:
        _check_payload(connection, max_payload_mb)
        configs = [stream_config(names, stream, store_bytes=store) for stream in STREAMS.values()]
        found = {config["name"]: await _look(connection, "STREAM", config["name"]) for config in configs}
        for config in configs:
            config["max_bytes"] = max(config["max_bytes"], _least(found[config["name"]]))
        # Streams that become smaller make room for those that grow or are new.
        for config in sorted(configs, key=lambda one: one["max_bytes"] - _bound(found[one["name"]])):
            await _stream(connection, {**config, **kept}, found[config["name"]])
        for consumer in consumers_of(roles):
            await _consumer(connection, names, consumer)


def _check_payload(connection: Connection, max_payload_mb: int) -> None:
    """Raise BusError when the server takes smaller messages than the run may send."""
    announced = connection.client.max_payload
    if announced < max_payload_mb << 20:
        raise BusError(
            f"the server at {connection.url} takes messages of {announced / (1 << 20):g} MB, but the run may "
            f"send {max_payload_mb} MB (bus.max_payload_mb)",
            remedy=f"Set max_payload: {max_payload_mb}MB in the server's configuration, or lower "
            "bus.max_payload_mb and with it agent.play_tokens, which bounds a play.",
        )


def _least(info: dict[str, Any] | None) -> int:
    """Return the smallest bound of a stream in bytes: it keeps its messages."""
    return 0 if info is None else min(_bound(info), int(info["state"]["bytes"] * _FULL) + _ROOM)


def _bound(info: dict[str, Any] | None) -> int:
    return 0 if info is None else int(info["config"]["max_bytes"])


async def _look(connection: Connection, kind: str, name: str) -> dict[str, Any] | None:
    try:
        return await connection.api(f"{kind}.INFO.{name}", seconds=_PATIENCE_SECONDS)
    except NotFound:
        return None


async def _stream(connection: Connection, config: dict[str, Any], found: dict[str, Any] | None) -> None:
    name = config["name"]
    if found is None:
        await _ask(connection, f"STREAM.CREATE.{name}", config, name)
    elif _differs(found["config"], config):
        await _ask(connection, f"STREAM.UPDATE.{name}", {**found["config"], **config}, name)


async def _consumer(connection: Connection, names: Names, consumer: Consumer) -> None:
    stream, config = names.stream("TASK"), consumer_config(names, consumer)
    found = await _look(connection, "CONSUMER", f"{stream}.{consumer.name}")
    if found is None or _differs(found["config"], config):
        body = {"stream_name": stream, "config": config}
        await _ask(connection, f"CONSUMER.DURABLE.CREATE.{stream}.{consumer.name}", body, consumer.name)


def _differs(existing: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return whether the server's configuration lacks a wanted value; it omits false and zero values."""
    return any(existing.get(key, type(value)()) != value for key, value in wanted.items())


async def _ask(connection: Connection, verb: str, body: dict[str, Any], name: str) -> None:
    try:
        await connection.api(verb, body, seconds=_PATIENCE_SECONDS)
    except ApiError as error:
        if error.code == _NO_ROOM:
            raise BusError(
                f"the server's store is too small for {name}",
                remedy="Raise bus.store_gb, or pass provision() the server's store_gb.",
            ) from error
        if error.code in _TOO_FEW:
            raise BusError(
                f"the broker has too few servers for the {body.get('num_replicas')} replicas of {name}",
                remedy="Start all servers of the cluster, or ask for fewer replicas.",
            ) from error
        raise BusError(
            f"the server refuses {name}: {error.description} (code {error.code})",
            remedy="A stream of an older version may stand in the way; use a new run name.",
        ) from error
