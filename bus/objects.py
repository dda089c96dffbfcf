"""Named bytes of any size (weights): cut into pieces, stored beside the messages of a run.

Tails: ``blob.data.<id>.<number>`` is a piece, ``blob.name.<name>`` the reference to all pieces of a name.
Pieces are written before the reference, so a reference that can be read has all its pieces until the name
changes.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import anyio
import anyio.to_thread
import msgspec

from bus.connection import Connection
from bus.errors import BusError, Denied, NotFound, Undecodable
from bus.publisher import Outgoing, Publisher
from bus.reads import from_any, from_leader
from bus.subjects import Names

log = logging.getLogger("spade.bus")
Source = bytes | Path
PIECE = 1 << 20
PIECE_ROOM = 4096
ORPHAN_SECONDS = 8 * 3600.0
_NAME = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*")
_TRIES = 3


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """Figures of named bytes: ``size`` in bytes, ``sha256`` in hex digits, ``id`` new with each put."""

    name: str
    size: int
    sha256: str
    id: str


class ObjectRef(msgspec.Struct, frozen=True, array_like=True):
    """The place of named bytes: ``size`` bytes in pieces of ``chunk``, ``sha256`` over all of them."""

    id: str
    size: int
    sha256: bytes
    chunk: int

    @property
    def count(self) -> int:
        """Return the number of pieces; empty bytes have none."""
        return -(-self.size // self.chunk)

    def info(self, name: str) -> BlobInfo:
        """Return the figures."""
        return BlobInfo(name=name, size=self.size, sha256=self.sha256.hex(), id=self.id)


_refs = msgspec.msgpack.Decoder(ObjectRef)


class Blobs:
    """Named bytes of any size (weights), kept until removed.

    They move in pieces of at most 1 MB, less where the server's limit is smaller, through a window of 16 MB
    and are checked by SHA-256. A name is dotted tokens of ``[A-Za-z0-9_=/-]``. After a cancelled put, readers
    see the old bytes or the new ones; orphaned pieces are removed after hours.
    """

    def __init__(self, connection: Connection, publisher: Publisher, names: Names) -> None:
        self._connection, self._publisher, self._names = connection, publisher, names
        self._stream = names.stream("BLOB")

    async def put(self, name: str, source: Source) -> BlobInfo:
        """Store bytes or a file under ``name``; readers see the old bytes or the new ones.

        Waits while the store is full. Raises OSError for the file.
        """
        before = await self._ref(name)
        await self._remove_orphans()
        chunk = min(PIECE, self._connection.client.max_payload - PIECE_ROOM)
        blob = f"{int(time.time()):x}-{secrets.token_hex(8)}"
        with await anyio.to_thread.run_sync(_open, source) as file:
            digest = await anyio.to_thread.run_sync(lambda: hashlib.file_digest(file, "sha256").digest())
            ref = ObjectRef(blob, file.seek(0, io.SEEK_END), digest, chunk)
            file.seek(0)
            async with aclosing(self._pieces(ref, file)) as pieces:
                await self._publisher.send_all(pieces)
        subject = self._names.subject(_tail(name))
        content = msgspec.msgpack.encode(ref)
        await self._publisher.send(Outgoing(self._stream, subject, content, f"{blob}.name"))
        if before is not None:
            await self._purge(f"blob.data.{before.id}.>")
        return ref.info(name)

    async def _pieces(
        self, ref: ObjectRef, file: io.BufferedReader | io.BytesIO
    ) -> AsyncGenerator[Outgoing, None]:
        for number in range(ref.count):
            piece = await anyio.to_thread.run_sync(file.read, ref.chunk)
            subject = self._names.subject(f"blob.data.{ref.id}.{number}")
            yield Outgoing(self._stream, subject, piece, f"{ref.id}.{number}")

    async def get(self, name: str) -> bytes:
        """Return the bytes. Raises NotFound, or Undecodable when pieces are missing or damaged."""
        whole = io.BytesIO()
        await self._fetch(name, whole)
        return whole.getvalue()

    async def save(self, name: str, path: Path) -> BlobInfo:
        """Write the bytes to ``path``, which appears complete or not at all.

        Raises NotFound, Undecodable or OSError.
        """
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            with partial.open("wb") as file:
                ref = await self._fetch(name, file)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return ref.info(name)

    async def bound(self) -> float:
        """Return the most bytes that all blobs together may have; infinite when unknown."""
        try:
            info = await self._connection.api(f"STREAM.INFO.{self._stream}")
        except Denied:
            return math.inf
        return float(info["config"]["max_bytes"])

    async def info(self, name: str) -> BlobInfo | None:
        """Return the figures of a blob, None when there is none."""
        ref = await self._ref(name)
        return None if ref is None else ref.info(name)

    async def remove(self, name: str) -> bool:
        """Remove a blob; returns whether there was one."""
        ref = await self._ref(name)
        if ref is None:
            return False
        await self._purge(_tail(name))
        await self._purge(f"blob.data.{ref.id}.>")
        return True

    async def _fetch(self, name: str, target: BinaryIO) -> ObjectRef:
        """Write the bytes of a name to ``target``. A name that changes meanwhile is read again."""
        for _ in range(_TRIES):
            ref = await self._ref(name)
            if ref is None:
                raise NotFound(f"no blob {name}")
            target.seek(0)
            target.truncate()
            try:
                await self._read_pieces(ref, target)
            except Undecodable:
                if await self._ref(name) == ref:
                    raise
            else:
                return ref
        raise BusError(f"blob {name} changes faster than it can be read")

    async def _read_pieces(self, ref: ObjectRef, target: BinaryIO) -> None:
        digest = hashlib.sha256()

        def keep(piece: bytes) -> None:
            digest.update(piece)
            target.write(piece)

        for number in range(ref.count):
            subject = self._names.subject(f"blob.data.{ref.id}.{number}")
            found = await from_any(self._connection, self._stream, {"last_by_subj": subject})
            if found is None:
                raise Undecodable(f"piece {number} of {ref.count} of blob {ref.id} is missing", kind="blob")
            await anyio.to_thread.run_sync(keep, found.data)
        if digest.digest() != ref.sha256:
            raise Undecodable(f"blob {ref.id} is damaged: its SHA-256 differs", kind="blob")

    async def _ref(self, name: str) -> ObjectRef | None:
        request = {"last_by_subj": self._names.subject(_tail(name))}
        found = await from_leader(self._connection, self._stream, request)
        if found is None:
            return None
        try:
            return _refs.decode(found.data)
        except msgspec.DecodeError as error:
            raise Undecodable(f"no reference of a blob: {error}", kind="blob") from error

    async def _remove_orphans(self) -> None:
        """Remove old pieces without a name: their writer was killed. A put may wait hours for room."""
        pattern = self._names.subject("blob.>")
        info = await self._connection.api(f"STREAM.INFO.{self._stream}", {"subjects_filter": pattern})
        tails = [self._names.tail(subject).split(".", 2) for subject in info["state"].get("subjects") or ()]
        refs = [await self._ref(rest) for _, kind, rest in tails if kind == "name"]
        used = {ref.id for ref in refs if ref is not None}
        blobs = {rest.split(".")[0] for _, kind, rest in tails if kind == "data"}
        for blob in blobs - used:
            if time.time() - int(blob.partition("-")[0], 16) > ORPHAN_SECONDS:
                log.info("removing blob %s, whose writer ended before it was complete", blob)
                await self._purge(f"blob.data.{blob}.>")

    async def _purge(self, pattern: str) -> None:
        body = {"filter": self._names.subject(pattern)}
        await self._connection.api(f"STREAM.PURGE.{self._stream}", body)


def _open(source: Source) -> io.BufferedReader | io.BytesIO:
    return source.open("rb") if isinstance(source, Path) else io.BytesIO(source)


def _tail(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BusError(f"the name of a blob {name!r} has characters outside [A-Za-z0-9_=/.-]")
    return f"blob.name.{name}"
