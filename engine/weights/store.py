"""Published weights as files: one safetensors file per version, written atomically, named by a digest.

Layout: ``<directory>/<fence>-<step>/model.safetensors``. The learner writes, the server role checks; they
share nothing but the path, the size and the digest that travel in ``PolicyPublished``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from engine.errors import SpadeError
from engine.files import sync
from engine.lineage import Version
from engine.weights import tensor_file

if TYPE_CHECKING:
    import torch

FILE_NAME = "model.safetensors"
_DIRECTORY = re.compile(r"(\d+)-(\d+)")
_CHUNK = 1 << 20
_PIECE = 1 << 26
_HASHERS = min(8, os.cpu_count() or 1)
_LARGEST_HEADER = 100 << 20
_TIED_HEAD = "lm_head.weight"
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class WeightFault(SpadeError):
    """Published weights are missing, damaged, or do not fit the model."""


class TensorInfo(NamedTuple):
    """The type (safetensors' name, such as ``BF16``) and the shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Release:
    """A version as it is announced (the fields of ``PolicyPublished``); ``sha256`` is a :func:`file_digest`.

    ``name`` and ``file`` are those of the object that must lie on the bus first, empty where none must.
    """

    uri: str
    sha256: str
    size: int
    name: str = ""
    file: Path = Path()


def publish(
    directory: Path,
    version: Version,
    tensors: Mapping[str, torch.Tensor],
    *,
    keep: int = 3,
    dtype: torch.dtype | None = None,
    name: str = FILE_NAME,
    metadata: dict[str, str] | None = None,
) -> Release:
    """Write ``tensors`` as ``version`` and prune old versions: see :func:`begin`.

    A tensor that shares its storage with an earlier one (tied embeddings) is written once, under the
    first name. ``dtype`` converts floating-point tensors.
    """
    found = _distinct(tensors, dtype)
    write = partial(tensor_file.write, tensors=found, metadata=metadata)
    return begin(directory, version, write, keep=keep, name=name)()


def begin(
    directory: Path,
    version: Version,
    write: Callable[[Path], Future[None] | None],
    *,
    keep: int = 3,
    name: str = FILE_NAME,
) -> Callable[[], Release]:
    """Begin to write ``version``. Call what is returned, in any thread, to wait for the end.

    ``write`` gets a path and writes there, or begins to and returns the future of its end. The file appears
    under its final name only when its bytes are on disk; then all but the newest ``keep`` versions are
    deleted. Publishing the same bytes again is harmless.

    Raises OSError, and WeightFault when other bytes were already published under this version.
    """
    home = directory / f"{version.fence}-{version.step}"
    home.mkdir(parents=True, exist_ok=True)
    temporary = home / f".{name}.{os.getpid()}.tmp"
    temporary.unlink(missing_ok=True)  # of a killed process with this number
    try:
        writing = write(temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise

    def finish() -> Release:
        try:
            if writing is not None:
                writing.result()
            digest, size = file_digest(temporary), temporary.stat().st_size
            _refuse_other_bytes(home / name, digest, version)
            temporary.replace(home / name)
        finally:
            temporary.unlink(missing_ok=True)
        for path in (home, directory):
            sync(path)
        prune(directory, keep=keep)
        return Release((home / name).resolve().as_uri(), digest, size)

    return finish


def prune(directory: Path, *, keep: int) -> list[Version]:
    """Delete all but the newest ``keep`` versions (at least one stays). Returns what was deleted."""
    surplus = versions(directory)[: -max(1, keep)]
    for version in surplus:
        shutil.rmtree(directory / f"{version.fence}-{version.step}", ignore_errors=True)
    return surplus


def versions(directory: Path) -> list[Version]:
    """Return the versions that lie under ``directory``, oldest first."""
    if not directory.is_dir():
        return []
    matches = (_DIRECTORY.fullmatch(path.name) for path in directory.iterdir())
    return sorted(Version(int(match[1]), int(match[2])) for match in matches if match)


def check(path: Path, sha256: str, size: int, *, model: Path | None = None) -> None:
    """Check the bytes of published weights, and their names and shapes against the directory ``model``.

    A directory without safetensors files is not compared. Raises WeightFault, OSError.
    """
    if not path.is_file():
        raise WeightFault("published weights are gone", where=str(path))
    found = path.stat().st_size
    if found != size:
        raise WeightFault(f"weights have {found} bytes, {size} were published", where=str(path))
    digest = file_digest(path)
    if digest != sha256:
        raise WeightFault(f"weights have SHA-256 {digest}, {sha256} was published", where=str(path))
    if model is not None and (expected := checkpoint(model)):
        compare(expected, header(path), tied=tied(model), where=str(path))


def header(path: Path) -> dict[str, TensorInfo]:
    """Return name -> type and shape of the tensors in a safetensors file, from its header alone.

    Raises WeightFault for a file that is none, OSError.
    """
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        content = stream.read(length) if length <= _LARGEST_HEADER else b""
    try:
        table = json.loads(content)
        return {
            name: TensorInfo(str(row["dtype"]), tuple(map(int, row["shape"])))
            for name, row in table.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightFault(f"no safetensors file: {error!r}", where=str(path)) from error


def checkpoint(directory: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a model directory that belong to the model (empty without safetensors files).

    Files that an index does not name are left out, and layers beyond ``num_hidden_layers``: those predict
    further tokens, and neither transformers nor the learner loads them.
    """
    files = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        files = [path for path in files if path.name in named]
    elif directory / FILE_NAME in files:
        files = [directory / FILE_NAME]
    found: dict[str, TensorInfo] = {}
    for path in files:
        found |= header(path)
    layers = _settings(directory).get("num_hidden_layers")
    return {
        name: info
        for name, info in found.items()
        if not (isinstance(layers, int) and (match := _LAYER.search(name)) and int(match[1]) >= layers)
    }


def compare(
    expected: Mapping[str, TensorInfo], found: Mapping[str, TensorInfo], *, tied: bool, where: str
) -> None:
    """Raise WeightFault unless both have the same names and shapes (a tied head may be absent)."""
    free = {_TIED_HEAD} if tied else set()
    missing = sorted(expected.keys() - found.keys() - free)
    surplus = sorted(found.keys() - expected.keys() - free)
    common = expected.keys() & found.keys()
    changed = sorted(name for name in common if expected[name].shape != found[name].shape)
    if missing or surplus or changed:
        raise WeightFault(
            f"weights do not fit the model: missing {missing[:5]}, unknown {surplus[:5]}, "
            f"other shape {changed[:5]} ({len(missing)}, {len(surplus)}, {len(changed)} in all)",
            where=where,
        )


def tied(model: Path) -> bool:
    """Return whether the head of ``model`` may be its embedding; the default of its configuration is yes."""
    return bool(_settings(model).get("tie_word_embeddings", True))


def _settings(model: Path) -> dict[str, object]:
    """Return the configuration of ``model``, that of its text part on top; empty if it cannot be read."""
    try:
        table = dict(json.loads((model / "config.json").read_text()))
        return table | dict(table.get("text_config") or {})
    except (OSError, ValueError, TypeError):
        return {}


def local_path(uri: str) -> Path:
    """Return the path of a ``file:`` URI or of a plain path.

    Raises WeightFault for any other scheme.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        raise WeightFault(f"cannot read weights from {parts.scheme}:", where=uri)
    return Path(unquote(parts.path))


def file_digest(path: Path) -> str:
    """Return the digest of a file, in hex: its SHA-256, above 64 MiB the SHA-256 of those of its pieces.

    The pieces of 64 MiB are hashed side by side: one thread would need 20 s for 60 GB.
    """
    starts = range(0, path.stat().st_size or 1, _PIECE)

    def piece(start: int) -> bytes:
        digest, left = hashlib.sha256(), _PIECE
        with path.open("rb") as stream:
            stream.seek(start)
            while chunk := stream.read(min(_CHUNK, left)):
                digest.update(chunk)
                left -= len(chunk)
        return digest.digest()

    if len(starts) == 1:
        return piece(0).hex()
    with ThreadPoolExecutor(max_workers=_HASHERS) as pool:
        return hashlib.sha256(b"".join(pool.map(piece, starts))).hexdigest()


def published_type(name: str, own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the type in which a tensor is published: floating-point ones become ``wanted``, unless None.

    The bias that corrects a router's choice (GLM-4 MoE, DeepSeek-V3) stays in float32, as in transformers'
    files: rounded, it would choose other experts.
    """
    if wanted is None or not own.is_floating_point or name.endswith("e_score_correction_bias"):
        return own
    return wanted


def as_published(name: str, tensor: torch.Tensor, wanted: torch.dtype | None) -> torch.Tensor:
    """Return ``tensor`` in its :func:`published_type`."""
    return tensor.to(published_type(name, tensor.dtype, wanted))


def _distinct(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    seen: set[tuple[int, tuple[int, ...]]] = set()
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        result[name] = as_published(name, tensor.detach(), dtype)
    return result


def _refuse_other_bytes(path: Path, digest: str, version: Version) -> None:
    if path.exists() and file_digest(path) != digest:
        raise WeightFault(
            f"version {version} was already published with other weights",
            where=str(path),
            remedy="A learner must take a new fence when it starts.",
        )
