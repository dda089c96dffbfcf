"""Whether the weights that travel by the bus have room there (``server.weights = "bus"``)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from bus.subjects import STREAMS
from engine.config import Config
from engine.errors import ConfigError
from engine.inference.adapters import kept
from engine.weights import layout
from engine.weights.store import WeightFault

STREAM = "BLOB"
_OVERHEAD = 1.01  # what the broker stores around each megabyte
_NOTES = 64 << 10  # what says which versions there are
_GB = 1 << 30
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
_WIDTHS = {"bfloat16": 2, "float32": 4}


def needed(size: int, keep: int, *, deltas: bool = False) -> int:
    """Return the most bytes that what leads to ``keep`` versions of ``size`` bytes takes on the bus. Old ones
    make room before a new one comes.

    With ``deltas`` it is one file more: even the last version of a chain needs all of it, which is less than
    two files (the deltas of a chain are smaller than a whole), and each version after it adds at most one.
    """
    return int(size * (keep + deltas) * _OVERHEAD) + _NOTES


def require(
    size: int, keep: int, bound: float, *, deltas: bool = False, store_gb: float | None = None
) -> None:
    """Raise ConfigError when what leads to ``keep`` versions of ``size`` bytes may not fit into ``bound``
    bytes, the part of ``store_gb`` that weights have; None: of a store whose size is not known here.

    They may have less than their share: a stream of an older build keeps what lies in it. In a larger store
    their part grows at least as much, so what is asked for is always enough.
    """
    wanted = needed(size, keep, deltas=deltas)
    if wanted <= bound:
        return
    times = wanted / max(1.0, bound)
    if store_gb is None:
        remedy = f"Make bus.store_gb {_rounded_up(times):g} times as large"
    else:
        remedy = f"Set bus.store_gb to {_rounded_up(store_gb * times):g} or more"
    raise ConfigError(
        f"The bus has room for {bound / _GB:.3g} GB of weights, and {keep} versions of {size / _GB:.3g} GB "
        f"each{' and their deltas' * deltas} have to lie there",
        where="server.weights",
        remedy=f'{remedy}, or set server.weights to "file" if learner and servers see the same disk.',
    )


def check(config: Config, model: Path) -> None:
    """Look, before anything starts, whether whole weights of the model in ``model`` fit. Raises ConfigError.

    Adapters are looked at when the first is there: their size follows from their settings.
    """
    server = config.server
    if server.weights == "bus" and not config.adapters and "learner" in config.run.roles:
        size, store_gb = published_bytes(model, config.model.dtype), config.bus.store_gb
        deltas = server.deltas and server.keyframe_every > 1
        bound = STREAMS[STREAM].share * store_gb * _GB
        require(size, kept(config), bound, deltas=deltas, store_gb=store_gb)


def published_bytes(model: Path, dtype: str) -> int:
    """Return about how many bytes the weights of the model in ``model`` have as published in ``dtype``."""
    return sum(_bytes(path, dtype) for path in model.glob("*.safetensors"))


def _bytes(path: Path, dtype: str) -> int:
    try:
        entries = layout.read(np.memmap(path, np.uint8, mode="r"), where=str(path)).entries
    except (WeightFault, ValueError, OSError):
        return 0  # who loads the model says more about it
    return sum(math.prod(one.shape) * _width(one.dtype, dtype) for one in entries)


def _width(stored: str, published: str) -> int:
    width = layout.WIDTHS[stored]
    return _WIDTHS.get(published, width) if stored in _FLOATS else width


def _rounded_up(number: float) -> float:
    """Return ``number``, or a little more, with two digits."""
    step = 10.0 ** max(-4, math.floor(math.log10(number)) - 1)
    return round(math.ceil(number / step) * step, 4)
