"""Checkpoints of the learner: one directory each, complete or absent.

Layout: ``<fence>-<step>-<cursor>/`` with ``model.safetensors``, ``optimizer.safetensors``, ``extra.pt``
(settings of the optimiser, random number generators), ``state.msgpack`` (:class:`LearnerState`: buffer,
cursor, ledger, lineage), the scorer's newest ``curriculum.snapshot``, and ``manifest.json`` (size and CRC-32
of each). A checkpoint is written beside its place, behind the training, flushed to the disk, and renamed;
only then older ones go.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog
import torch
from safetensors.torch import load_file

from bus.messages import BatchTrained
from engine.errors import SpadeError
from engine.files import sync
from engine.lineage import Lineage, Version
from engine.training.buffer import BufferState
from engine.training.sample_age import AgesState
from engine.training.supervised import Accepted

_MANIFEST, _STATE = "manifest.json", "state.msgpack"
MODEL, OPTIMIZER, EXTRA = "model.safetensors", "optimizer.safetensors", "extra.pt"
CURRICULUM = "curriculum.snapshot"
_CHUNK = 1 << 22
_log = structlog.get_logger()


@dataclass(frozen=True)
class CheckpointTensors:
    """The tensors of a checkpoint.

    ``model``: the weights by name, shared ones once. ``extra``: the states of the optimiser and of the
    random number generators, tensors and plain values only.
    """

    model: dict[str, torch.Tensor]
    extra: dict[str, Any]


class LearnerState(msgspec.Struct, frozen=True, kw_only=True):
    """The learner's state without tensors.

    ``cursor`` is the SAMPLE sequence up to which the stream was consumed; ``curriculum`` the EVENT sequence
    of the scorer's snapshot, -1 without one; ``announced`` the last BatchTrained, which may not have reached
    the bus; ``accepted`` the designs that the supervised mix draws from; ``ages`` see
    ``engine.training.sample_age``.
    """

    version: Version = Version(0, 0)
    lineage: Lineage = Lineage()
    cursor: int = 0
    buffer: BufferState = BufferState()
    curriculum: int = -1
    announced: BatchTrained | None = None
    accepted: tuple[Accepted, ...] = ()
    ages: AgesState = AgesState()

    @property
    def needs(self) -> int:
        """The lowest SAMPLE sequence that a learner which starts from here reads."""
        return min([self.cursor + 1, *(kept.sequence for kept in self.buffer.kept)])


class Checkpoint(NamedTuple):
    """A complete checkpoint on the disk."""

    path: Path
    state: LearnerState

    def tensors(self) -> CheckpointTensors:
        """Read the tensors."""
        return read_tensors(self.path)


def read_tensors(path: Path) -> CheckpointTensors:
    """Read the tensors of the checkpoint in ``path``; they stay in the files until used."""
    extra = torch.load(path / EXTRA, map_location="cpu", weights_only=True, mmap=True)
    for name, tensor in load_file(path / OPTIMIZER).items():
        parameter, _, key = name.rpartition("/")
        extra["optimizer"]["state"][parameter][key] = tensor
    return CheckpointTensors(load_file(path / MODEL), extra)


def name_of(state: LearnerState) -> str:
    """Return the name of the directory of a checkpoint."""
    return f"{state.version.fence:06d}-{state.version.step:010d}-{state.cursor:012d}"


def begin(
    directory: Path,
    state: LearnerState,
    write: Callable[[Path], Future[None]],
    *,
    keep: int,
    spared: Collection[str] = (),
    curriculum: bytes = b"",
) -> Callable[[], Path]:
    """Begin to write a checkpoint under ``directory``; call what is returned, in any thread, to complete it.

    ``write`` gets a directory and begins to write the tensors there (:data:`MODEL`, :data:`OPTIMIZER`,
    :data:`EXTRA`). The call waits for their end and returns the checkpoint's path; all but the newest
    ``keep`` and those ``spared`` by name are deleted. ``curriculum`` is the scorer's snapshot, if available.
    Saving the same version and cursor again writes nothing. Both raise SpadeError when the disk is full or
    refuses it; older checkpoints stay.
    """
    place = directory / name_of(state)
    if place.exists():
        try:
            _verify(place)
            _prune(directory, keep, spared)
            return lambda: place
        except (OSError, ValueError):
            shutil.rmtree(place, ignore_errors=True)
    for remains in directory.glob(".*.tmp"):
        shutil.rmtree(remains, ignore_errors=True)
    temporary = directory / f".{place.name}.{os.getpid()}.tmp"
    with _removed_on_failure(temporary, place):
        temporary.mkdir(parents=True)
        writing = write(temporary)

    def complete() -> Path:
        with _removed_on_failure(temporary, place):
            writing.result()
            (temporary / _STATE).write_bytes(msgspec.msgpack.encode(state))
            if curriculum:
                (temporary / CURRICULUM).write_bytes(curriculum)
            _seal(temporary)
            temporary.rename(place)
            sync(directory)
        _prune(directory, keep, spared)
        return place

    return complete


@contextmanager
def _removed_on_failure(temporary: Path, place: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError | RuntimeError):  # torch wraps a full disk in an error of its own
            raise
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        free = shutil.disk_usage(place.parent if place.parent.exists() else place.parent.parent).free >> 20
        raise SpadeError(
            "The disk is full: the checkpoint was not written"
            if full or free < 16
            else f"The checkpoint was not written: {error}",
            where=f"{place}, {free} MB free",
            remedy="Free some space and start the run again; it goes on from the checkpoint before.",
        ) from error


def newest(directory: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint; incomplete and damaged ones are skipped with a warning.

    Raises SpadeError when there are checkpoints and none of them is usable.
    """
    known = places(directory)
    for place in known:
        try:
            return read(place)
        except (OSError, ValueError) as error:
            _log.warning("checkpoint.skipped", path=str(place), reason=str(error))
    if known:
        raise SpadeError(
            f"None of {len(known)} checkpoints is usable",
            where=str(directory),
            remedy="Move them away and set learner.start_over=true to start from the starting model again; "
            "trained steps are lost then.",
        )
    return None


def read(place: Path) -> Checkpoint:
    """Return the checkpoint in ``place`` when it is complete. Raises OSError or ValueError."""
    _verify(place)
    return Checkpoint(place, _state(place))


def needed(directory: Path, *, keep: int) -> int | None:
    """Return the lowest SAMPLE sequence that one of the newest ``keep`` checkpoints needs, None without one.

    The older ones of these count too: a damaged checkpoint costs the steps since the one before it, not
    samples. A checkpoint that is kept as the best does not hold samples in the stream.
    """
    lowest: list[int] = []
    for place in places(directory)[: max(1, keep)]:
        try:
            state = _state(place)
        except (OSError, ValueError) as error:
            _log.warning("checkpoint.unreadable", path=str(place), reason=str(error))
            continue
        lowest.append(state.needs)
    return min(lowest, default=None)


def restart(source: Path, directory: Path) -> Path:
    """Put a copy of the checkpoint in ``source`` under ``directory`` for a new run that starts there.

    Weights, optimiser, random numbers and accepted designs are kept; version, cursor and buffer are those
    of a new run. Returns its path. Raises OSError or ValueError when ``source`` is not complete.
    """
    state = LearnerState(accepted=read(source).state.accepted)
    place = directory / name_of(LearnerState())
    temporary = directory / f".{place.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        for name in (MODEL, OPTIMIZER, EXTRA):
            shutil.copyfile(source / name, temporary / name)
        (temporary / _STATE).write_bytes(msgspec.msgpack.encode(state))
        _seal(temporary)
        shutil.rmtree(place, ignore_errors=True)  # of an earlier attempt
        temporary.rename(place)
        sync(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place


def _state(place: Path) -> LearnerState:
    try:
        return msgspec.msgpack.decode((place / _STATE).read_bytes(), type=LearnerState)
    except msgspec.DecodeError as error:
        raise ValueError(f"{_STATE} is of another form: {error}") from error


def _seal(directory: Path) -> None:
    """Flush the files and write the manifest."""
    manifest = {}
    for path in sorted(directory.iterdir()):
        sync(path)
        manifest[path.name] = _fingerprint(path)
    (directory / _MANIFEST).write_text(json.dumps(manifest))
    sync(directory / _MANIFEST)
    sync(directory)


def _prune(directory: Path, keep: int, spared: Collection[str]) -> None:
    for old in places(directory)[max(1, keep) :]:
        if old.name not in spared:
            shutil.rmtree(old, ignore_errors=True)


def _verify(place: Path) -> None:
    """Compare the files with the manifest. Raises OSError, or ValueError for damaged ones."""
    try:
        manifest = msgspec.json.decode((place / _MANIFEST).read_bytes(), type=dict[str, tuple[int, int]])
    except msgspec.DecodeError as error:
        raise ValueError(f"{_MANIFEST} is damaged: {error}") from error
    if absent := {MODEL, OPTIMIZER, EXTRA, _STATE} - manifest.keys():
        raise ValueError(f"{_MANIFEST} does not name {sorted(absent)}")
    for name, fingerprint in manifest.items():
        if fingerprint != _fingerprint(place / Path(name).name):
            raise ValueError(f"{name} is damaged")


def _fingerprint(path: Path) -> tuple[int, int]:
    checksum = 0
    for chunk in _chunks(path):
        checksum = zlib.crc32(chunk, checksum)
    return path.stat().st_size, checksum


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk


def places(directory: Path) -> list[Path]:
    """Return the checkpoint directories, newest first (a higher fence started later)."""
    if not directory.is_dir():
        return []
    names = [path for path in directory.iterdir() if path.name.replace("-", "").isdigit()]
    return sorted(names, key=lambda path: path.name, reverse=True)
