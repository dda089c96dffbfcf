"""Published weights as files: one safetensors file a version, written atomically, named by a digest.

Layout: ``<directory>/<fence>-<step>/model.safetensors``. The publishing side is the learner, the
fetching side the weight-transfer engine inside vLLM; they share nothing but the path, the size and the
SHA-256 that travel in ``PolicyPublished``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from engine.errors import SpadeError
from engine.lineage import Version

if TYPE_CHECKING:
    import torch

FILE_NAME = "model.safetensors"
_DIRECTORY = re.compile(r"(\d+)-(\d+)")
_CHUNK = 1 << 20


class WeightFault(SpadeError):
    """Published weights are missing, torn, or not what their digest says."""


@dataclass(frozen=True)
class Published:
    """Where a version lies: ``uri`` (file://), hex ``sha256`` and ``size`` in bytes of the file."""

    uri: str
    sha256: str
    size: int


def publish(
    directory: Path,
    version: Version,
    tensors: Mapping[str, torch.Tensor],
    *,
    keep: int = 3,
    dtype: torch.dtype | None = None,
    name: str = FILE_NAME,
    metadata: dict[str, str] | None = None,
) -> Published:
    """Write ``tensors`` as ``version`` and prune old versions down to the newest ``keep``.

    A tensor that shares its storage with an earlier one (tied embeddings) is written once, under the
    first name. ``dtype`` converts floating-point tensors. The file appears under its final name only
    when its bytes are on disk. Publishing the same bytes again is harmless.

    Raises WeightFault when other bytes were already published under this version.
    """
    from safetensors.torch import save_file

    home = directory / f"{version.fence}-{version.step}"
    home.mkdir(parents=True, exist_ok=True)
    temporary = home / f".{name}.{os.getpid()}.tmp"
    try:
        save_file(_distinct(tensors, dtype), temporary, metadata=metadata)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        digest, size = file_digest(temporary), temporary.stat().st_size
        _refuse_other_bytes(home / name, digest, version)
        temporary.replace(home / name)
    finally:
        temporary.unlink(missing_ok=True)
    for path in (home, directory):
        _sync_directory(path)
    prune(directory, keep=keep)
    return Published((home / name).resolve().as_uri(), digest, size)


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


def fetch(uri: str, sha256: str, size: int) -> Path:
    """Return the local path of published weights after checking their size and digest.

    Raises WeightFault when the file is missing or its bytes are not those that were published.
    """
    path = local_path(uri)
    if not path.is_file():
        raise WeightFault("published weights are gone", where=str(path))
    found = path.stat().st_size
    if found != size:
        raise WeightFault(f"weights have {found} bytes, {size} were published", where=str(path))
    digest = file_digest(path)
    if digest != sha256:
        raise WeightFault(f"weights have SHA-256 {digest}, {sha256} was published", where=str(path))
    return path


def local_path(uri: str) -> Path:
    """Return the path of a ``file:`` URI or of a plain path.

    Raises WeightFault for any other scheme.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        raise WeightFault(f"cannot read weights from {parts.scheme}:", where=uri)
    return Path(unquote(parts.path))


def file_digest(path: Path) -> str:
    """Return the hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _distinct(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    seen: set[tuple[int, tuple[int, ...]]] = set()
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and identity in seen:
            continue
        seen.add(identity)
        converted = tensor.detach().to("cpu")
        if dtype is not None and converted.is_floating_point():
            converted = converted.to(dtype)
        result[name] = converted.contiguous()
    return result


def _refuse_other_bytes(path: Path, digest: str, version: Version) -> None:
    if path.exists() and file_digest(path) != digest:
        raise WeightFault(
            f"version {version} was already published with other weights",
            where=str(path),
            remedy="A learner must take a new fence when it starts.",
        )


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
