"""Checks that the weights that travel by the bus fit into their part of its store (``weights = "bus"``)."""

from __future__ import annotations

import math
from pathlib import Path

from bus.subjects import STREAMS
from engine.config import Config
from engine.errors import ConfigError
from engine.inference.adapters import kept
from engine.weights import store

STREAM = "BLOB"
FULL_SHARE = 0.5
"""Above this share of its bound the stream of samples gets a checkpoint after each round.

Two checkpoints make room, and a round has to fit beside the samples that they still need."""
_OVERHEAD = 1.01  # stored by the broker around each megabyte
_INDEX_BYTES = 64 << 10
_GB = 1 << 30
_WIDTHS = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "U32": 4,
    "I64": 8,
    "U64": 8,
}
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_SERVED = {"bfloat16": 2, "float32": 4}


def needed(size: int, keep: int) -> int:
    """Return the bytes that ``keep`` versions of ``size`` bytes take on the bus at most."""
    return int(size * keep * _OVERHEAD) + _INDEX_BYTES


def require(size: int, keep: int, bound: float, *, store_gb: float | None = None) -> None:
    """Raise ConfigError when ``keep`` versions of ``size`` bytes may not fit into ``bound`` bytes.

    ``bound`` is the part of ``store_gb`` that weights have; None stands for a store of unknown size. In a
    larger store their part grows at least as much, so the size that the error asks for is always enough.
    """
    wanted = needed(size, keep)
    if wanted <= bound:
        return
    times = wanted / max(1.0, bound)
    if store_gb is None:
        remedy = f"Make bus.store_gb {_rounded_up(times):g} times as large"
    else:
        remedy = f"Set bus.store_gb to {_rounded_up(store_gb * times):g} or more"
    raise ConfigError(
        f"The bus has room for {bound / _GB:.3g} GB of weights, and {keep} versions of {size / _GB:.3g} GB "
        "each have to fit",
        where="server.weights",
        remedy=f'{remedy}, or set server.weights to "file" if learner and servers see the same disk.',
    )


def check(config: Config, model: Path) -> None:
    """Check before the start that whole weights of the model in ``model`` fit. Raises ConfigError.

    Adapters are checked when the first is published: their size follows from their settings.
    """
    if config.server.weights == "bus" and not config.adapters and "learner" in config.run.roles:
        size, store_gb = published_bytes(model, config.model.dtype), config.bus.store_gb
        require(size, kept(config.curriculum.lead), STREAMS[STREAM].share * store_gb * _GB, store_gb=store_gb)


def published_bytes(model: Path, dtype: str) -> int:
    """Return about how many bytes the weights of the model in ``model`` have as published in ``dtype``."""
    try:
        tensors = store.checkpoint(model).values()
    except (store.WeightFault, OSError):
        return 0  # loading the model reports it
    return sum(math.prod(one.shape) * _width(one.dtype, dtype) for one in tensors)


def _width(stored: str, published: str) -> int:
    width = _WIDTHS.get(stored, 1)
    return _SERVED.get(published, width) if stored in _FLOATS else width


def _rounded_up(number: float) -> float:
    """Return ``number``, or a little more, with two digits."""
    step = 10.0 ** max(-4, math.floor(math.log10(number)) - 1)
    return round(math.ceil(number / step) * step, 4)
