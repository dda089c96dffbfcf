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
from pathlib import Path
from typing import BinaryIO

import anyio
import anyio.to_thread
import msgspec

from bus.connection import Connection
from bus.errors import BusError, Denied, NotFound, Undecodable
from bus.interface import BlobInfo, Blobs, Source
from bus.publisher import StreamPublisher
from bus.reads import certain, direct
from bus.subjects import Names

log = logging.getLogger("spade.bus")
STREAM = "BLOB"
PIECE = 1 << 20
PIECE_ROOM = 4096
ORPHAN_SECONDS = 8 * 3600.0
_NAME = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*")
_TRIES = 3


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


_refs = msgspec.msgpack.Decoder(ObjectRef)


class ObjectStore(Blobs):
    """The blobs of a run over NATS. Pieces fit the message limit that the server announced."""

    def __init__(self, connection: Connection, publisher: StreamPublisher, names: Names) -> None:
        self._connection, self._publisher, self._names = connection, publisher, names
        self._stream = names.stream(STREAM)
        self._counts = dict.fromkeys(("put", "put_bytes", "got_bytes", "removed"), 0.0)

    def statistics(self) -> dict[str, float]:
        """Return counters."""
        return {f"blob_{name}": value for name, value in self._counts.items()}

    async def put(self, name: str, source: Source) -> BlobInfo:
        tail, before = _tail(name), await self._ref(name)
        await self._remove_orphans()
        chunk = min(PIECE, self._connection.client.max_payload - PIECE_ROOM)
        reader = _PieceReader(source, chunk)
        blob = f"{int(time.time()):x}-{secrets.token_hex(8)}"
        async with self._publisher.batch() as batch, aclosing(reader.pieces()) as pieces:
            number = 0
            async for piece in pieces:
                subject = self._names.subject(f"blob.data.{blob}.{number}")
                await batch.put(self._stream, subject, piece, message_id=f"{blob}.{number}")
                number += 1
            await batch.finish()
        ref = ObjectRef(blob, reader.size, reader.digest, chunk)
        subject = self._names.subject(tail)
        await self._publisher.send(
            self._stream, subject, msgspec.msgpack.encode(ref), message_id=f"{blob}.name"
        )
        if before is not None:
            await self._drop(before.id)
        self._counts["put"] += 1
        self._counts["put_bytes"] += ref.size
        return _info(name, ref)

    async def get(self, name: str) -> bytes:
        whole = io.BytesIO()
        await self._fetch(name, whole)
        return whole.getvalue()

    async def save(self, name: str, path: Path) -> BlobInfo:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            with partial.open("wb") as file:
                ref = await self._fetch(name, file)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return _info(name, ref)

    async def bound(self) -> float:
        try:
            info = await self._connection.api(f"STREAM.INFO.{self._stream}")
        except Denied:
            return math.inf
        return float(info["config"]["max_bytes"])

    async def info(self, name: str) -> BlobInfo | None:
        ref = await self._ref(name)
        return None if ref is None else _info(name, ref)

    async def remove(self, name: str) -> bool:
        ref = await self._ref(name)
        if ref is None:
            return False
        await self._purge(_tail(name))
        await self._drop(ref.id)
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
            what = f"piece {number} of {ref.count} of blob {ref.id}"
            request: dict[str, object] = {"last_by_subj": subject}
            found = await direct(self._connection, self._stream, request, what)
            if found is None and self._connection.clustered:
                found = await certain(self._connection, self._stream, request)
            if found is None:
                raise Undecodable(f"{what} is missing", kind="blob")
            await anyio.to_thread.run_sync(keep, found.data)
            self._counts["got_bytes"] += len(found.data)
        if digest.digest() != ref.sha256:
            raise Undecodable(f"blob {ref.id} is damaged: its SHA-256 differs", kind="blob")

    async def _ref(self, name: str) -> ObjectRef | None:
        request: dict[str, object] = {"last_by_subj": self._names.subject(_tail(name))}
        found = await certain(self._connection, self._stream, request)
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
                await self._drop(blob)

    async def _drop(self, blob: str) -> None:
        await self._purge(f"blob.data.{blob}.>")
        self._counts["removed"] += 1

    async def _purge(self, pattern: str) -> None:
        body = {"filter": self._names.subject(pattern)}
        await self._connection.api(f"STREAM.PURGE.{self._stream}", body)


class _PieceReader:
    """Cuts a source into pieces of ``chunk`` bytes, and hashes it on the way."""

    def __init__(self, source: Source, chunk: int) -> None:
        self._source, self._chunk = source, chunk
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> bytes:
        return self._hash.digest()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the pieces. Raises OSError for a file that cannot be read."""
        if isinstance(self._source, Path):
            file: BinaryIO = await anyio.to_thread.run_sync(self._source.open, "rb")
        else:
            view = memoryview(self._source)
            file = io.BytesIO(view.cast("B") if view.c_contiguous else view.tobytes())
        with file:
            while piece := await anyio.to_thread.run_sync(self._next, file):
                yield piece

    def _next(self, file: BinaryIO) -> bytes:
        piece = file.read(self._chunk)
        self._hash.update(piece)
        self.size += len(piece)
        return piece


def _tail(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BusError(f"the name of a blob {name!r} has characters outside [A-Za-z0-9_=/.-]")
    return f"blob.name.{name}"


def _info(name: str, ref: ObjectRef) -> BlobInfo:
    return BlobInfo(name=name, size=ref.size, sha256=ref.sha256.hex(), id=ref.id)
