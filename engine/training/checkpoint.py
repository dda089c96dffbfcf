"""Checkpoints of the learner: one directory each, complete or not there at all.

Layout: ``<fence>-<step>-<cursor>/`` with ``model.safetensors``, ``extra.pt`` (optimiser, random number
generators), ``state.msgpack`` (:class:`LearnerState`) and ``manifest.json`` (size and CRC-32 of each). A
checkpoint is written beside its place, flushed to the disk, and renamed; only then older ones go.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
import torch
from safetensors.torch import load_file, save_file

from bus.messages import BatchTrained
from engine.errors import SpadeError
from engine.lineage import Lineage, Version
from engine.training.buffer import BufferState
from engine.training.capsule import Capsule
from engine.training.supervised import Accepted

_MANIFEST, _STATE, _MODEL, _EXTRA = "manifest.json", "state.msgpack", "model.safetensors", "extra.pt"
_CHUNK = 1 << 22
_log = structlog.get_logger()


class LearnerState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but tensors. ``cursor`` is the SAMPLE sequence up to which the stream was consumed;
    ``announced`` the last BatchTrained, which may or may not have reached the bus; ``accepted`` the designs
    that the supervised mix draws from."""

    version: Version = Version(0, 0)
    lineage: Lineage = Lineage()
    cursor: int = 0
    buffer: BufferState = BufferState()
    announced: BatchTrained | None = None
    accepted: tuple[Accepted, ...] = ()

    @property
    def needs(self) -> int:
        """The lowest SAMPLE sequence that a learner which starts from here reads."""
        return min([self.cursor + 1, *(sequence for sequence, _ in self.buffer.kept)])


class Checkpoint(NamedTuple):
    """A complete checkpoint on the disk."""

    path: Path
    state: LearnerState

    def tensors(self) -> Capsule:
        """Read the tensors."""
        return tensors(self.path)


def tensors(path: Path) -> Capsule:
    """Read the tensors of the checkpoint in ``path``; those of the optimiser stay in the file until used."""
    extra = torch.load(path / _EXTRA, map_location="cpu", weights_only=True, mmap=True)
    return Capsule(load_file(path / _MODEL), extra)


def save(directory: Path, state: LearnerState, capsule: Capsule, *, keep: int) -> Path:
    """Write a checkpoint under ``directory`` and delete all but the newest ``keep``. Returns its path.

    Saving the same version and cursor again does nothing. Raises SpadeError when the disk is full or does
    not take it; what was there before stays.
    """
    place = directory / f"{state.version.fence:06d}-{state.version.step:010d}-{state.cursor:012d}"
    if place.exists():
        try:
            _verify(place)
            return place
        except (OSError, ValueError, KeyError):
            shutil.rmtree(place, ignore_errors=True)
    for remains in directory.glob(".*.tmp"):
        shutil.rmtree(remains, ignore_errors=True)
    temporary = directory / f".{place.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        _write(temporary, state, capsule)
        temporary.rename(place)
        _flush(directory)
    except (OSError, RuntimeError) as error:  # torch and safetensors wrap a full disk in their own errors
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        free = shutil.disk_usage(directory if directory.exists() else directory.parent).free >> 20
        raise SpadeError(
            "The disk is full: the checkpoint was not written"
            if full or free < 16
            else f"The checkpoint was not written: {error}",
            where=f"{place}, {free} MB free",
            remedy="Free some space and start the run again; it goes on from the checkpoint before.",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in _places(directory)[max(1, keep) :]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def newest(directory: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint; incomplete and damaged ones are skipped with a warning.

    Raises SpadeError when there are checkpoints and none of them is usable.
    """
    places = _places(directory)
    for place in places:
        try:
            _verify(place)
            return Checkpoint(place, msgspec.msgpack.decode((place / _STATE).read_bytes(), type=LearnerState))
        except (OSError, ValueError, KeyError) as error:
            _log.warning("checkpoint.skipped", path=str(place), reason=str(error))
    if places:
        raise SpadeError(
            f"None of {len(places)} checkpoints is usable",
            where=str(directory),
            remedy="Move them away to start from the starting model again; trained steps are lost then.",
        )
    return None


def needed(directory: Path) -> int | None:
    """Return the lowest SAMPLE sequence that some checkpoint needs, None without one.

    The older ones count too: a damaged checkpoint costs the steps since the one before it, not samples.
    """
    lowest: list[int] = []
    for place in _places(directory):
        try:
            state = msgspec.msgpack.decode((place / _STATE).read_bytes(), type=LearnerState)
        except (OSError, ValueError) as error:
            _log.warning("checkpoint.unreadable", path=str(place), reason=str(error))
            continue
        lowest.append(state.needs)
    return min(lowest, default=None)


def _write(directory: Path, state: LearnerState, capsule: Capsule) -> None:
    writers: dict[str, Callable[[Path], object]] = {
        _MODEL: lambda path: save_file(
            {name: tensor.contiguous() for name, tensor in capsule.model.items()}, path
        ),
        _EXTRA: lambda path: torch.save(capsule.extra, path),
        _STATE: lambda path: path.write_bytes(msgspec.msgpack.encode(state)),
    }
    manifest = {}
    for name, write in writers.items():
        write(directory / name)
        _flush(directory / name)
        manifest[name] = _fingerprint(directory / name)
    (directory / _MANIFEST).write_text(json.dumps(manifest))
    _flush(directory / _MANIFEST)
    _flush(directory)


def _verify(place: Path) -> None:
    manifest = json.loads((place / _MANIFEST).read_text())
    for name in (_MODEL, _EXTRA, _STATE):
        if manifest[name] != _fingerprint(place / name):
            raise ValueError(f"{name} is damaged")


def _fingerprint(path: Path) -> list[int]:
    checksum = 0
    for chunk in _chunks(path):
        checksum = zlib.crc32(chunk, checksum)
    return [path.stat().st_size, checksum]


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk


def _places(directory: Path) -> list[Path]:
    """Return the checkpoint directories, newest first (a higher fence started later)."""
    if not directory.is_dir():
        return []
    names = [path for path in directory.iterdir() if path.name.replace("-", "").isdigit()]
    return sorted(names, key=lambda path: path.name, reverse=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
