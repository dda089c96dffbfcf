"""State with compare-and-set, and leases on top of it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from bus.concurrency import flat_task_group
from bus.connection import Connection
from bus.errors import BusError, BusUnavailable, Conflict
from bus.interface import Lease
from bus.publisher import StreamPublisher
from bus.reads import certain
from bus.subjects import Names

log = logging.getLogger("spade.bus")
_EXPECT = "Nats-Expected-Last-Subject-Sequence"
_TTL = "Nats-TTL"
_ID = "Nats-Msg-Id"
_FREE = b""
_LEAST_TTL = 1.0


def _expiring(ttl: float | None) -> dict[str, str]:
    return {} if ttl is None else {_TTL: f"{max(1, round(ttl * 1000))}ms"}


class KeyValueStore:
    """The key-value buckets of a run. Keys are dotted tokens of ``[A-Za-z0-9_=/-]``."""

    def __init__(self, connection: Connection, publisher: StreamPublisher, names: Names) -> None:
        self._connection, self._publisher, self._names = connection, publisher, names

    async def get(self, bucket: str, key: str) -> tuple[int, bytes] | None:
        """Return (revision, value), None when there is no such key."""
        found = await self._last(bucket, key)
        return None if found is None else found[:2]

    async def put(self, bucket: str, key: str, value: bytes, *, ttl: float | None = None) -> int:
        """Write and return the revision. The server forgets the key after ``ttl`` seconds."""
        subject, headers = self._names.key(bucket, key), _expiring(ttl)
        answer = await self._publisher.send(
            self._names.bucket(bucket), subject, value, headers, message_id=secrets.token_hex(12)
        )
        return answer.seq

    async def update(
        self, bucket: str, key: str, value: bytes, revision: int, *, ttl: float | None = None
    ) -> int:
        """Write if the key still has ``revision`` (0: absent) and return the new one.

        Raises Conflict. A conflict with our own earlier write, whose answer was lost, is success.
        """
        headers = {_EXPECT: str(revision), **_expiring(ttl)}
        subject, mine = self._names.key(bucket, key), secrets.token_hex(12)
        try:
            answer = await self._publisher.send(
                self._names.bucket(bucket), subject, value, headers, message_id=mine
            )
        except Conflict:
            found = await self._last(bucket, key)
            if found is not None and found[2] == mine:
                return found[0]
            raise Conflict(f"{key} is no longer at revision {revision}") from None
        return answer.seq

    async def _last(self, bucket: str, key: str) -> tuple[int, bytes, str] | None:
        subject = self._names.key(bucket, key)
        answer = await certain(self._connection, self._names.bucket(bucket), {"last_by_subj": subject})
        if answer is None:
            return None
        headers = answer.headers or {}
        return int(headers["Nats-Sequence"]), answer.data, headers.get(_ID, "")

    @asynccontextmanager
    async def lease(
        self, name: str, holder: str, *, ttl: float, wait: float, ended: str = ""
    ) -> AsyncIterator[Lease]:
        """Hold ``name`` (:meth:`bus.interface.Bus.lease`); holders that begin with ``ended`` are no more."""
        if ttl < _LEAST_TTL:
            raise BusError(f"lease {name}: ttl {ttl:g} s is below the server's {_LEAST_TTL:g} s")
        sent, revision = await self._acquire(name, holder, ttl, wait, ended.encode())
        lease = Lease(revision)
        renewal = _LeaseRenewal(self, name, holder, ttl, lease, sent)
        try:
            async with flat_task_group() as group:
                group.start_soon(renewal.run)
                try:
                    yield lease
                finally:
                    group.cancel_scope.cancel()
        finally:
            if not lease.lost.is_set():
                with anyio.move_on_after(2.0, shield=True):
                    await self._release(name, holder)

    async def _release(self, name: str, holder: str) -> None:
        """Mark the lease as free if it is still ours, whichever renewal was the last to arrive.

        A deletion would take a right on the whole bucket, others' leases included.
        """
        try:
            found = await self.get("lease", name)
            if found is not None and found[1] == holder.encode():
                await self.update("lease", name, _FREE, found[0], ttl=_LEAST_TTL)
        except BusError as error:
            log.debug("lease %s stays until it expires: %s", name, error)

    async def _acquire(
        self, name: str, holder: str, ttl: float, wait: float, ended: bytes
    ) -> tuple[float, int]:
        with anyio.move_on_after(wait):
            while True:
                sent = anyio.current_time()
                try:
                    return sent, await self.update("lease", name, holder.encode(), 0, ttl=ttl)
                except Conflict:
                    taken = await self._take_free(name, holder, ttl, ended)
                    if taken is not None:
                        return sent, taken
                    await anyio.sleep(min(1.0, ttl / 10))
        found = await self.get("lease", name)
        other = found[1].decode(errors="replace") if found and found[1] != _FREE else "no one now"
        raise BusUnavailable(f"lease {name}, held by {other},", wait, remedy="Does another one run?")

    async def _take_free(self, name: str, holder: str, ttl: float, ended: bytes) -> int | None:
        """Return the revision with which a lease that was left became ours, None when it is held."""
        found = await self.get("lease", name)
        if found is None or not (found[1] == _FREE or (ended and found[1].startswith(ended))):
            return None
        try:
            return await self.update("lease", name, holder.encode(), found[0], ttl=ttl)
        except Conflict:
            return None


class _LeaseRenewal:
    """Renews one lease. The right ends ``ttl`` after the last renewal that succeeded was *sent*."""

    def __init__(
        self, state: KeyValueStore, name: str, holder: str, ttl: float, lease: Lease, sent: float
    ) -> None:
        self._state, self._name, self._holder, self._ttl = state, name, holder, ttl
        self._lease, self._expires = lease, sent + ttl
        self.revision = lease.revision

    async def run(self) -> None:
        """Renew until the lease is lost."""
        while not self._lease.lost.is_set():
            await anyio.sleep(self._ttl / 3)
            await self._renew()

    async def _renew(self) -> None:
        sent = anyio.current_time()
        try:
            with anyio.move_on_after(self._expires - sent):
                self.revision = await self._state.update(
                    "lease", self._name, self._holder.encode(), self.revision, ttl=self._ttl
                )
                self._expires = sent + self._ttl
                return
        except Conflict:
            log.error("lease %s was taken by another holder", self._name)
        except BusError as error:
            log.warning("renewing lease %s: %s", self._name, error)
            if anyio.current_time() < self._expires:
                return
        self._lease.lost.set()
