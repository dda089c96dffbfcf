"""Rights of the roles on the broker: one allow-list per role, as data.

A role may publish its own facts, read the streams it follows, pull its own queue, and nothing else. The lists
are in terms of the bus (streams, tails, keys); :func:`permissions` turns them into subjects of the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bus.errors import BusError
from bus.messages.base import token
from bus.subjects import CONSUMERS, Consumer, Names

ADMIN = "supervisor"


@dataclass(frozen=True)
class Access:
    """The rights of one role.

    ``publishes`` are subject tails, ``follows`` streams it reads in order and by number, ``looks`` streams
    it reads single messages of, ``works`` durables it pulls from, ``purges`` streams, ``leases`` and
    ``keys`` (of the state bucket) what it writes, ``listens`` tails without a stream; ``blobs``: it writes
    named bytes. Every role may also read state and named bytes, and send its heartbeat.
    """

    publishes: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    looks: tuple[str, ...] = ()
    works: tuple[str, ...] = ()
    purges: tuple[str, ...] = ()
    leases: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    listens: tuple[str, ...] = ()
    blobs: bool = False


ROLES: Mapping[str, Access] = {
    "designer": Access(
        publishes=("sample.designer.>", "event.designer.*", "event.designer.ready.*"),
        follows=("EVENT",),
        looks=("SAMPLE",),
        works=("designer",),
        keys=("designer.spent.*",),
    ),
    "agent": Access(publishes=("sample.agent.>", "event.agent.*"), follows=("EVENT",), works=("agent",)),
    "scorer": Access(
        # It also speaks for those who cannot any more: servers that vanished, work that was given up.
        publishes=(
            "task.>",
            "sample.credit.>",
            "event.scorer.*",
            "event.server.lost",
            "event.designer.failed",
            "event.agent.failed",
        ),
        follows=("EVENT", "DLQ"),
        looks=("TASK", "SAMPLE"),
        leases=("leader.scorer",),
        keys=("scorer.flushed", "scorer.snapshot"),
        listens=("hb.>",),
    ),
    "learner": Access(
        publishes=("event.learner.*",),
        follows=("SAMPLE", "EVENT"),
        purges=("SAMPLE",),
        leases=("leader.learner",),
        keys=("lineage", "learner"),
        blobs=True,
    ),
    "server": Access(publishes=("event.server.*",), follows=("EVENT",)),
    "evaluator": Access(publishes=("event.evaluator.*",), follows=("EVENT",)),
}


def access_of(role: str) -> Access:
    """Return the allow-list of a role.

    One that is not built in may read all facts, publish its own (``event.ROLE.>``), keep state under
    ``ROLE.>`` and pull the durable that bears its name.
    """
    return ROLES.get(role) or Access(
        publishes=(f"event.{role}.>", f"task.{role}.>"),
        follows=("EVENT",),
        works=(role,),
        keys=(f"{role}.>",),
    )


def _own_consumer(role: str) -> Consumer:
    return Consumer(check_role(role), f"task.{role}.>")


def consumers_of(roles: Iterable[str]) -> list[Consumer]:
    """Return the durables of a run with ``roles``: the built-in ones, and one for each role of your own."""
    own = [name for name in dict.fromkeys(roles) if name not in ROLES and name != ADMIN]
    return [*CONSUMERS.values(), *map(_own_consumer, own)]


def queue_of(consumer: str, role: str) -> Consumer:
    """Return the durable that a client of ``role`` may name: built in or its role's own. Raises BusError."""
    if consumer not in (*CONSUMERS, role):
        raise BusError(
            f"unknown consumer {consumer!r}",
            remedy=f"One of {', '.join(CONSUMERS)}, or your own role's name.",
        )
    return CONSUMERS.get(consumer) or _own_consumer(role)


def check_role(role: str) -> str:
    """Return ``role`` if it can be part of a subject. Raises BusError."""
    if not role or token(role) != role:
        raise BusError(f"role {role!r} cannot be part of a subject", remedy="Use a-z, 0-9, '-' and '_'.")
    return role


def permissions(names: Names, role: str) -> dict[str, list[str]]:
    """Return the subjects that ``role`` may ``publish`` and ``subscribe`` to in the run of ``names``.

    The supervisor may do everything in it.
    """
    check_role(role)
    inbox, run = f"_INBOX.{role}.>", names.subject(">")
    if role == ADMIN:
        return {"publish": ["$JS.API.>", "$JS.ACK.>", run], "subscribe": [inbox, run]}
    access = access_of(role)
    allowed = ["$JS.API.INFO", "$JS.API.STREAM.NAMES", names.subject(f"hb.{role}.*")]
    allowed += [names.subject(tail) for tail in access.publishes]
    allowed += [names.subject(f"state.{key}") for key in access.keys]
    allowed += [names.subject(f"lease.{name}") for name in access.leases]
    read = [names.stream(kind) for kind in ("STATE", "LEASE", "BLOB", *access.follows, *access.looks)]
    # From any copy, and from the leader, who alone can say for certain that a message is gone.
    verbs = ("DIRECT.GET", "STREAM.MSG.GET", "STREAM.INFO")
    allowed += [f"$JS.API.{verb}.{stream}" for stream in read for verb in verbs]
    # Following takes a short-lived consumer; its name is random, so one reader cannot meet another's.
    for kind in access.follows:
        verbs = ("CREATE", "MSG.NEXT", "DELETE")
        allowed += [f"$JS.API.CONSUMER.{verb}.{names.stream(kind)}.*" for verb in verbs]
        allowed += [names.subject(f"dlq.{kind.lower()}")]
    for name in access.works:
        stream = names.stream("TASK")
        allowed += [f"$JS.API.CONSUMER.{verb}.{stream}.{name}" for verb in ("INFO", "MSG.NEXT")]
        allowed += [f"$JS.ACK.{stream}.{name}.>", f"$JS.ACK.*.*.{stream}.{name}.>"]
        allowed += [names.subject("dlq.task")]
    if access.blobs:
        allowed += [names.subject("blob.>"), f"$JS.API.STREAM.PURGE.{names.stream('BLOB')}"]
    allowed += [f"$JS.API.STREAM.PURGE.{names.stream(kind)}" for kind in access.purges]
    heard = [names.subject(tail) for tail in access.listens]
    return {"publish": allowed, "subscribe": [inbox, *heard]}
