"""State with compare-and-set, and leases on top of it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from bus.concurrency import flat_task_group
from bus.connection import Connection
from bus.errors import BusError, BusUnavailable, Conflict
from bus.publisher import Outgoing, Publisher
from bus.reads import Stored, from_leader, stored_of
from bus.subjects import Names

log = logging.getLogger("spade.bus")
_EXPECT = "Nats-Expected-Last-Subject-Sequence"
_FREE = b""
_LEAST_TTL = 1.0
_RELEASE_SECONDS = 2.0


@dataclass(slots=True)
class Lease:
    """A singleton right.

    ``revision`` grows with each holder: it is the fencing token. ``lost`` is set when the right ends before
    it is given back; the holder must stop at once.
    """

    revision: int
    lost: anyio.Event = field(default_factory=anyio.Event)


class KeyValueStore:
    """Values by key in the streams STATE and LEASE. Keys are dotted tokens of ``[A-Za-z0-9_=/-]``."""

    def __init__(self, connection: Connection, publisher: Publisher, names: Names) -> None:
        self._connection, self._publisher, self._names = connection, publisher, names

    async def get(self, kind: str, key: str) -> Stored | None:
        """Return the value of a key, whose ``sequence`` is the revision; None when there is no such key."""
        request = {"last_by_subj": self._names.key(kind, key)}
        answer = await from_leader(self._connection, self._names.stream(kind), request)
        return None if answer is None else stored_of(self._names, answer)

    async def put(
        self, kind: str, key: str, value: bytes, *, revision: int | None = None, ttl: float | None = None
    ) -> int:
        """Write and return the new revision. The server forgets the key after ``ttl`` seconds.

        With ``revision`` only if the key still has it (0: absent); raises Conflict otherwise. A conflict with
        our own earlier write, whose answer was lost, is success.
        """
        mine, headers = secrets.token_hex(12), {}
        if revision is not None:
            headers[_EXPECT] = str(revision)
        if ttl is not None:
            headers["Nats-TTL"] = f"{round(ttl * 1000)}ms"
        subject = self._names.key(kind, key)
        message = Outgoing(self._names.stream(kind), subject, value, mine, headers)
        try:
            return await self._publisher.send(message)
        except Conflict:
            found = await self.get(kind, key)
            if found is not None and found.id == mine:
                return found.sequence
            raise Conflict(f"{key} is no longer at revision {revision}") from None

    @asynccontextmanager
    async def lease(
        self, name: str, holder: str, *, ttl: float, wait: float, ended: str = ""
    ) -> AsyncIterator[Lease]:
        """Hold ``name`` (:meth:`bus.client.Bus.lease`); holders that begin with ``ended`` are no more."""
        if ttl < _LEAST_TTL:
            raise BusError(f"lease {name}: ttl {ttl:g} s is below the server's {_LEAST_TTL:g} s")
        sent, revision = await self._acquire(name, holder, ttl, wait, ended.encode())
        lease = Lease(revision)
        try:
            async with flat_task_group() as group:
                group.start_soon(self._renew, name, holder, ttl, lease, sent + ttl)
                try:
                    yield lease
                finally:
                    group.cancel_scope.cancel()
        finally:
            if not lease.lost.is_set():
                with anyio.move_on_after(_RELEASE_SECONDS, shield=True):
                    await self._release(name, holder)

    async def _acquire(
        self, name: str, holder: str, ttl: float, wait: float, ended: bytes
    ) -> tuple[float, int]:
        """Return when the successful request was sent, and the revision it gave."""
        found: Stored | None = None
        with anyio.move_on_after(wait):
            while True:
                found = await self.get("LEASE", name)
                if found is None or found.frame == _FREE or (ended and found.frame.startswith(ended)):
                    sent, free = anyio.current_time(), found.sequence if found else 0
                    try:
                        return sent, await self.put("LEASE", name, holder.encode(), revision=free, ttl=ttl)
                    except Conflict:
                        continue
                await anyio.sleep(min(1.0, ttl / 10))
        other = found.frame.decode(errors="replace") if found and found.frame != _FREE else "no one now"
        raise BusUnavailable(f"lease {name}, held by {other},", wait, remedy="Does another one run?")

    async def _renew(self, name: str, holder: str, ttl: float, lease: Lease, expires: float) -> None:
        """Renew until the lease is lost: ``ttl`` after the last renewal that succeeded was *sent*."""
        revision = lease.revision
        while anyio.current_time() < expires:
            await anyio.sleep(min(ttl / 3, expires - anyio.current_time()))
            sent = anyio.current_time()
            try:
                with anyio.move_on_after(expires - sent):
                    revision = await self.put("LEASE", name, holder.encode(), revision=revision, ttl=ttl)
                    expires = sent + ttl
            except Conflict:
                log.error("lease %s was taken by another holder", name)
                break
            except BusError as error:
                log.warning("renewing lease %s: %s", name, error)
        lease.lost.set()

    async def _release(self, name: str, holder: str) -> None:
        """Mark the lease as free if it is still ours, whichever renewal was the last to arrive.

        A deletion would take a right on the whole bucket, others' leases included.
        """
        try:
            found = await self.get("LEASE", name)
            if found is not None and found.frame == holder.encode():
                await self.put("LEASE", name, _FREE, revision=found.sequence, ttl=_LEAST_TTL)
        except BusError as error:
            log.debug("lease %s stays until it expires: %s", name, error)
