"""Bytes that are too large for a message: cut into pieces, put and fetched through a window.

Tails, with ``blob`` as an example of the stream's first word: ``blob.data.<id>.<number>`` a piece,
``blob.name.<name>`` the reference of a named blob, ``blob.claim.<id>.<owner>.<number>`` who needs it (see
``bus.claims``). Pieces are written before the reference to them, so a reference that can be read has all its
pieces, unless they were removed or forgotten.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

import anyio
import anyio.to_thread
import msgspec

from bus.blobstore import Store
from bus.codec import BlobRef
from bus.errors import BusError, Denied, Incomplete, NotFound, Undecodable
from bus.interface import BlobInfo, Blobs, Source

CHUNK = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*")
_TRIES = 3
_refs = msgspec.msgpack.Decoder(BlobRef)


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """The note of a blob that is being written: the stream and tail of the message it is for or, with an
    empty stream, the name.
    """

    stream: str
    tail: str


def fresh_id() -> str:
    """Return an id that no other blob has."""
    return secrets.token_hex(10)


def claim_tail(store: Store, blob: str, owner: str, number: int = 0) -> str:
    """Return the tail of the note that ``owner`` needs a blob (``open``: it is being written)."""
    return f"{store.head}.claim.{blob}.{owner}.{number}"


def _flat(source: bytes | bytearray | memoryview) -> memoryview:
    """Return the bytes of a source, whatever its items and strides are."""
    view = memoryview(source)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


class _Cutter:
    """Cuts a source into pieces and hashes it on the way."""

    def __init__(self, source: Source) -> None:
        self._source = source if isinstance(source, Path) else _flat(source)
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> bytes:
        return self._hash.digest()

    def _next(self, file: BinaryIO | None) -> bytes:
        if file is not None:
            piece = file.read(CHUNK)
        else:
            assert not isinstance(self._source, Path)
            piece = bytes(self._source[self.size : self.size + CHUNK])
        self._hash.update(piece)
        self.size += len(piece)
        return piece

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        file = None
        if isinstance(self._source, Path):
            file = await anyio.to_thread.run_sync(self._source.open, "rb")
        try:
            while piece := await anyio.to_thread.run_sync(self._next, file):
                yield piece
        finally:
            if file is not None:
                file.close()


async def put_pieces(store: Store, blob: str, source: Source, opened: Opened | None) -> BlobRef:
    """Store a blob and, with ``opened``, the note that it is being written; return its reference.

    Memory: one window of the publisher, whatever the size. Raises OSError for a file that cannot be read.
    """
    cutter = _Cutter(source)

    async def values() -> AsyncGenerator[tuple[str, bytes], None]:
        if opened is not None:
            yield claim_tail(store, blob, "open"), msgspec.msgpack.encode(opened)
        number = 0
        async for piece in cutter.pieces():
            yield f"{store.head}.data.{blob}.{number}", piece
            number += 1

    source_of = values()
    async with aclosing(source_of):
        await store.write(source_of)
    return BlobRef(blob, cutter.size, cutter.digest, CHUNK, store.kind)


async def get_pieces(store: Store, ref: BlobRef) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a blob in order. Raises Incomplete when one is missing, Undecodable when the digest
    differs.

    The digest is known only at the end: use nothing before. At most eight pieces are in memory.
    """
    digest, size = hashlib.sha256(), 0
    tails = [f"{store.head}.data.{ref.id}.{number}" for number in range(ref.count)]
    async with aclosing(store.read(tails)) as source:
        number = 0
        async for piece in source:
            if piece is None:
                raise Incomplete(f"piece {number} of {ref.count} of blob {ref.id} is missing", kind="blob")
            await anyio.to_thread.run_sync(digest.update, piece)
            size += len(piece)
            number += 1
            yield piece
    if size != ref.size or digest.digest() != ref.sha256:
        raise Undecodable(f"blob {ref.id} is damaged: its SHA-256 differs", kind="blob")


async def get_bytes(store: Store, ref: BlobRef) -> bytes:
    """Return a whole blob. Raises Undecodable."""
    parts: list[bytes] = []
    async with aclosing(get_pieces(store, ref)) as source:
        parts = [piece async for piece in source]
    return parts[0] if len(parts) == 1 else b"".join(parts)


class NamedBlobs(Blobs):
    """The public blobs of a bus. ``release`` looks whether a blob is still needed, soon or (True) now."""

    def __init__(self, store: Store, release: Callable[[Store, str, bool], Awaitable[None]]) -> None:
        self._store, self._release = store, release

    async def put(self, name: str, source: Source) -> BlobInfo:
        tail, before = _tail(name), await self._ref(name)
        ref = await put_pieces(self._store, fresh_id(), source, Opened("", name))
        await self._store.note(tail, msgspec.msgpack.encode(ref))
        await self._store.note(claim_tail(self._store, ref.id, "named"), name.encode())
        await self._store.drop(claim_tail(self._store, ref.id, "open"))
        if before is not None:
            await self._release(self._store, before.id, False)
        return _info(name, ref)

    async def get(self, name: str) -> bytes:
        for _ in range(_TRIES):
            ref = await self._need(name)
            try:
                return await get_bytes(self._store, ref)
            except Undecodable:
                if await self._ref(name) == ref:
                    raise
        raise BusError(f"blob {name} changes faster than it can be read")

    async def save(self, name: str, path: Path) -> BlobInfo:
        for _ in range(_TRIES):
            ref = await self._need(name)
            try:
                await self._save(ref, path)
            except Undecodable:
                if await self._ref(name) == ref:
                    raise
            else:
                return _info(name, ref)
        raise BusError(f"blob {name} changes faster than it can be read")

    async def _save(self, ref: BlobRef, path: Path) -> None:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            with partial.open("wb") as file:
                async with aclosing(get_pieces(self._store, ref)) as source:
                    async for piece in source:
                        await anyio.to_thread.run_sync(file.write, piece)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    async def bound(self) -> float:
        try:
            return await self._store.bound()
        except Denied:
            return math.inf

    async def info(self, name: str) -> BlobInfo | None:
        ref = await self._ref(name)
        return None if ref is None else _info(name, ref)

    async def remove(self, name: str) -> bool:
        ref = await self._ref(name)
        if ref is None:
            return False
        await self._store.drop(_tail(name))
        await self._release(self._store, ref.id, True)
        return True

    async def _need(self, name: str) -> BlobRef:
        ref = await self._ref(name)
        if ref is None:
            raise NotFound(f"no blob {name}")
        return ref

    async def _ref(self, name: str) -> BlobRef | None:
        value = await self._store.value(_tail(name))
        return None if value is None else read_ref(value)


def read_ref(value: bytes) -> BlobRef:
    """Return the reference in a stored value. Raises Undecodable."""
    try:
        return _refs.decode(value)
    except msgspec.DecodeError as error:
        raise Undecodable(f"no reference of a blob: {error}", kind="blob") from error


def _tail(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BusError(f"the name of a blob {name!r} has characters outside [A-Za-z0-9_=/.-]")
    return f"blob.name.{name}"


def _info(name: str, ref: BlobRef) -> BlobInfo:
    return BlobInfo(name=name, size=ref.size, sha256=ref.sha256.hex(), id=ref.id)
