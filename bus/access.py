"""Rights of the roles on the broker: one allow-list per role, as data.

A role may publish its own facts, read the streams it follows, pull its own queue, and nothing else. What
a list allows is written in terms of the bus (streams, tails, keys); :func:`permissions` turns it into
subjects of the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bus.errors import BusError
from bus.messages.base import token
from bus.subjects import BUCKETS, CONSUMERS, Consumer, Names

ADMIN = "supervisor"


@dataclass(frozen=True)
class Access:
    """The rights of one role.

    ``publishes`` are subject tails, ``follows`` streams it reads in order and by number, ``looks`` streams
    it reads single messages of, ``works`` durables it pulls from, ``purges`` streams, ``leases`` and
    ``keys`` (of the state bucket) what it writes, ``listens`` tails without a stream; ``blobs``: it writes
    named bytes. Every role may also read state and named bytes, send its heartbeat and hear commands.
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


@dataclass(frozen=True)
class Permissions:
    """Subjects that a user of the server may publish to and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


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


def consumer_of(role: str) -> Consumer:
    """Return the durable of a role that is not built in: work for it lies under ``task.ROLE.>``."""
    return CONSUMERS.get(role) or Consumer(role, f"task.{role}.>")


def consumers_of(roles: Iterable[str]) -> list[Consumer]:
    """Return the durables of a run with ``roles``: the built-in ones, and one for each role of your own."""
    own = [name for name in dict.fromkeys(roles) if name not in ROLES and name != ADMIN]
    return [*CONSUMERS.values(), *(consumer_of(check_role(name)) for name in own)]


def queue_of(consumer: str, role: str, known: Mapping[str, Consumer] = CONSUMERS) -> Consumer:
    """Return the durable that a client of ``role`` may name ``consumer``.

    A built-in one, or that of its own role. Raises BusError.
    """
    if consumer in known:
        return known[consumer]
    if consumer != role or token(role) != role:
        raise BusError(
            f"unknown consumer {consumer!r}", remedy=f"One of {', '.join(known)}, or your own role's name."
        )
    return consumer_of(role)


def check_role(role: str) -> str:
    """Return ``role`` if it can be part of a subject. Raises BusError."""
    if not role or token(role) != role:
        raise BusError(f"role {role!r} cannot be part of a subject", remedy="Use a-z, 0-9, '-' and '_'.")
    return role


def permissions(names: Names, role: str) -> Permissions:
    """Return the rights of ``role`` in the run of ``names``. The supervisor may do everything in it."""
    check_role(role)
    inbox = f"_INBOX.{role}.>"
    if role == ADMIN:
        # Who is connected to this account: for `spade bus top`.
        mine = ("$JS.API.>", "$JS.ACK.>", "$SYS.REQ.ACCOUNT.PING.CONNZ", names.subject(">"))
        keys = tuple(names.keys(kind) + ">" for kind in BUCKETS)
        return Permissions((*mine, *keys), (inbox, names.subject(">"), "$JS.EVENT.ADVISORY.>"))
    access = access_of(role)
    publish = [
        "$JS.API.INFO",
        "$JS.API.STREAM.NAMES",
        f"$JS.API.DIRECT.GET.{names.bucket('state')}",
        f"$JS.API.STREAM.MSG.GET.{names.bucket('state')}",
        names.subject(f"hb.{role}.*"),
        *(names.subject(tail) for tail in access.publishes),
        *_reading(names, access),
        *_working(names, access),
        *(f"$JS.API.STREAM.PURGE.{names.stream(kind)}" for kind in access.purges),
        *(names.keys("state") + key for key in access.keys),
        *_leasing(names, access),
        *_blobs(names, access),
    ]
    listens = [names.subject(tail) for tail in ("ctl.>", *access.listens)]
    return Permissions(tuple(dict.fromkeys(publish)), (inbox, *listens))


def _reading(names: Names, access: Access) -> list[str]:
    """Following takes a short-lived consumer; its name is random, so one reader cannot meet another's."""
    # From any copy, and from the leader, who alone can say for certain that a message is gone.
    verbs = ("DIRECT.GET", "STREAM.MSG.GET")
    read = [names.stream(kind) for kind in (*access.follows, *access.looks)]
    subjects = [f"$JS.API.{verb}.{stream}" for stream in read for verb in (*verbs, "STREAM.INFO")]
    for kind in access.follows:
        stream = names.stream(kind)
        subjects += [
            f"$JS.API.CONSUMER.CREATE.{stream}.*",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
            f"$JS.API.CONSUMER.DELETE.{stream}.*",
        ]
        if kind != "DLQ":
            subjects.append(names.subject(f"dlq.{kind.lower()}"))
    return subjects


def _working(names: Names, access: Access) -> list[str]:
    subjects = []
    for name in access.works:
        stream = names.stream(consumer_of(name).stream)
        subjects += [
            f"$JS.API.CONSUMER.INFO.{stream}.{name}",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}",
            f"$JS.ACK.{stream}.{name}.>",
            f"$JS.ACK.*.*.{stream}.{name}.>",
            names.subject("dlq.task"),
        ]
    return subjects


def _blobs(names: Names, access: Access) -> list[str]:
    """Named bytes, which every role reads and few write."""
    stream = names.stream("BLOB")
    subjects = [f"$JS.API.{verb}.{stream}" for verb in ("STREAM.INFO", "DIRECT.GET", "STREAM.MSG.GET")]
    if access.blobs:
        subjects += [names.subject("blob.>"), f"$JS.API.STREAM.PURGE.{stream}"]
    return subjects


def _leasing(names: Names, access: Access) -> list[str]:
    subjects = [names.key("lease", name) for name in access.leases]
    read = [f"$JS.API.{verb}.{names.bucket('lease')}" for verb in ("DIRECT.GET", "STREAM.MSG.GET")]
    return [*subjects, *read] if subjects else []
