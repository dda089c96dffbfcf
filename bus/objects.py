"""Named bytes of any size (weights): cut into pieces, stored beside the messages of a run.

Tails: ``blob.data.<id>.<number>`` is a piece, ``blob.name.<name>`` the reference to all pieces of a name.
Pieces are written before the reference, so a reference that can be read has all its pieces until the name
changes.
"""

from __future__ import annotations

import hashlib
import io
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

import anyio
import anyio.to_thread
import msgspec

from bus.connection import Connection
from bus.errors import BusError, NotFound, Undecodable
from bus.publisher import Outgoing, Publisher
from bus.reads import from_any, from_leader
from bus.subjects import Names

log = logging.getLogger("spade.bus")
Source = bytes | Path
PIECE = 1 << 20
PIECE_ROOM = 4096
ORPHAN_SECONDS = 8 * 3600.0
_TRIES = 3


class BlobInfo(msgspec.Struct, frozen=True, array_like=True):
    """The reference of named bytes: ``size`` bytes in pieces of ``chunk``; ``id`` is new with each put."""

    id: str
    size: int
    digest: bytes
    chunk: int

    @property
    def sha256(self) -> str:
        """The SHA-256 of all bytes, in hex digits."""
        return self.digest.hex()

    @property
    def count(self) -> int:
        """The number of pieces; empty bytes have none."""
        return -(-self.size // self.chunk)


_refs = msgspec.msgpack.Decoder(BlobInfo)


class Blobs:
    """Named bytes of any size (weights), kept until removed.

    They move in pieces of at most 1 MB, less where the server's limit is smaller, through a window of 16 MB
    and are checked by SHA-256. A name is dotted tokens of ``[A-Za-z0-9_=/-]``. The pieces of a put that was
    cancelled are removed after hours.
    """

    def __init__(self, connection: Connection, publisher: Publisher, names: Names) -> None:
        self._connection, self._publisher, self._names = connection, publisher, names
        self._stream = names.stream("BLOB")

    async def put(self, name: str, source: Source) -> BlobInfo:
        """Store bytes or a file under ``name``; readers see the old bytes or the new ones.

        Waits while the store is full. Raises OSError for the file.
        """
        before = await self.info(name)
        await self._remove_orphans()
        chunk = min(PIECE, self._connection.client.max_payload - PIECE_ROOM)
        blob = f"{int(time.time()):x}-{secrets.token_hex(8)}"
        with await anyio.to_thread.run_sync(_open, source) as file:
            digest = await anyio.to_thread.run_sync(lambda: hashlib.file_digest(file, "sha256").digest())
            ref = BlobInfo(blob, file.seek(0, io.SEEK_END), digest, chunk)
            file.seek(0)
            async with aclosing(self._pieces(ref, file)) as pieces:
                await self._publisher.send_all(pieces)
        content = msgspec.msgpack.encode(ref)
        await self._publisher.send(Outgoing(self._stream, self._subject(name), content, f"{blob}.name"))
        if before is not None:
            await self._purge(f"data.{before.id}.>")
        return ref

    async def _pieces(self, ref: BlobInfo, file: BinaryIO) -> AsyncGenerator[Outgoing, None]:
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
        return ref

    async def bound(self) -> float:
        """Return the most bytes that all blobs together may have."""
        return float((await self._connection.api(f"STREAM.INFO.{self._stream}"))["config"]["max_bytes"])

    async def info(self, name: str) -> BlobInfo | None:
        """Return the reference of a blob, None when there is none."""
        request = {"last_by_subj": self._subject(name)}
        found = await from_leader(self._connection, self._stream, request)
        if found is None:
            return None
        try:
            return _refs.decode(found.data)
        except msgspec.DecodeError as error:
            raise Undecodable(f"no reference of a blob: {error}", kind="blob") from error

    async def remove(self, name: str) -> bool:
        """Remove a blob; returns whether there was one."""
        ref = await self.info(name)
        if ref is None:
            return False
        await self._purge(f"name.{name}")
        await self._purge(f"data.{ref.id}.>")
        return True

    async def _fetch(self, name: str, target: BinaryIO) -> BlobInfo:
        """Write the bytes of a name to ``target``. A name that changes meanwhile is read again."""
        for _ in range(_TRIES):
            ref = await self.info(name)
            if ref is None:
                raise NotFound(f"no blob {name}")
            target.seek(0)
            target.truncate()
            try:
                await self._read_pieces(ref, target)
            except Undecodable:
                if await self.info(name) == ref:
                    raise
            else:
                return ref
        raise BusError(f"blob {name} changes faster than it can be read")

    async def _read_pieces(self, ref: BlobInfo, target: BinaryIO) -> None:
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
        if digest.digest() != ref.digest:
            raise Undecodable(f"blob {ref.id} is damaged: its SHA-256 differs", kind="blob")

    async def _remove_orphans(self) -> None:
        """Remove old pieces without a name: their writer was killed. A put may wait hours for room."""
        pattern = self._names.subject("blob.>")
        info = await self._connection.api(f"STREAM.INFO.{self._stream}", {"subjects_filter": pattern})
        tails = [self._names.tail(subject).split(".", 2) for subject in info["state"].get("subjects") or ()]
        refs = [await self.info(rest) for _, kind, rest in tails if kind == "name"]
        used = {ref.id for ref in refs if ref is not None}
        blobs = {rest.split(".")[0] for _, kind, rest in tails if kind == "data"}
        for blob in blobs - used:
            if time.time() - int(blob.partition("-")[0], 16) > ORPHAN_SECONDS:
                log.info("removing blob %s, whose writer ended before it was complete", blob)
                await self._purge(f"data.{blob}.>")

    def _subject(self, name: str) -> str:
        return self._names.key("BLOB", f"name.{name}")

    async def _purge(self, pattern: str) -> None:
        body = {"filter": self._names.subject(f"blob.{pattern}")}
        await self._connection.api(f"STREAM.PURGE.{self._stream}", body)


def _open(source: Source) -> io.BufferedReader | io.BytesIO:
    return source.open("rb") if isinstance(source, Path) else io.BytesIO(source)
