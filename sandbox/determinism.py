"""Same program, seed and actions: same transcript. Patches for honesty, not for security.

:func:`patch` replaces, once in the zygote, every door to entropy and clocks by functions of one state;
:func:`seed` sets that state in an instance. What remains are addresses (``id``, sets of plain objects):
the validator finds those by replay (reference spec sandbox 6.8).
"""

from __future__ import annotations

import datetime
import hashlib
import os
import random
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

EPOCH_NS = 1_767_225_600 * 10**9  # 2026-01-01T00:00:00Z
TICK_NS = 10**6

_real_seed = random.Random.seed
_real_gmtime, _real_strftime, _real_asctime = time.gmtime, time.strftime, time.asctime


class _State:
    """``key`` of the entropy stream with its ``counter``; ``clock`` in nanoseconds since the start."""

    key = b""
    counter = 0
    clock = 0


def seed(value: int | str, *, numpy: bool = False) -> None:
    """Start all streams afresh from ``value``; the clock goes back to its epoch.

    ``numpy`` False leaves numpy's own stream as the zygote left it, which is the same everywhere, and saves
    an instance that does not use it from copying the generator.
    """
    _State.key = hashlib.sha256(str(value).encode()).digest()
    _State.counter = _State.clock = 0
    number = int.from_bytes(_State.key[:8], "little")
    random.seed(number)
    if numpy and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)


def patch() -> None:
    """Replace entropy, clocks and process ids in this interpreter, and seed everything."""
    _patch_entropy()
    _patch_time()
    _patch_datetime()
    seed("zygote", numpy=True)


def _stream(size: int, /) -> bytes:
    """Counter-mode SHA-256 in place of the kernel's entropy."""
    blocks = []
    for _ in range(-(-size // 32)):
        blocks.append(hashlib.sha256(_State.key + _State.counter.to_bytes(8, "little")).digest())
        _State.counter += 1
    return b"".join(blocks)[:size]


def _seed_random(self: random.Random, a: Any = None, version: int = 2) -> None:
    _real_seed(self, int.from_bytes(_stream(32), "little") if a is None else a, version)


def _patch_entropy() -> None:
    random._urandom = _stream  # type: ignore[attr-defined]
    random.Random.seed = _seed_random  # type: ignore[method-assign]
    random.seed = random._inst.seed
    os.urandom = _stream
    os.getrandom = lambda size, flags=0: _stream(size)
    os.getpid = lambda: 2
    os.getppid = lambda: 1
    uuid.uuid1 = lambda node=None, clock_seq=None: uuid.UUID(bytes=_stream(16), version=1)
    uuid.uuid4 = lambda: uuid.UUID(bytes=_stream(16), version=4)
    uuid.getnode = lambda: 1


def _tick() -> int:
    _State.clock += TICK_NS
    return _State.clock


def _wall_ns() -> int:
    return EPOCH_NS + _tick()


def _sleep(seconds: float, /) -> None:
    """Advance the clock instead of waiting."""
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    _State.clock += int(seconds * 10**9)


def _now() -> float:
    return _wall_ns() / 10**9


def _broken_down(seconds: float | None = None, /) -> time.struct_time:
    return _real_gmtime(_now() if seconds is None else seconds)


def _strftime(form: str, moment: Any = None, /) -> str:
    return _real_strftime(form, _broken_down() if moment is None else moment)


def _asctime(moment: Any = None, /) -> str:
    return _real_asctime(_broken_down() if moment is None else moment)


def _patch_time() -> None:
    # these close over this module's clock, so a program that reads the time twice sees it pass
    replacements: dict[str, Callable[..., Any]] = {
        "time": _now,
        "time_ns": _wall_ns,
        "sleep": _sleep,
        "gmtime": _broken_down,
        "localtime": _broken_down,
        "strftime": _strftime,
        "asctime": _asctime,
        "ctime": lambda seconds=None, /: _asctime(_broken_down(seconds)),
        "clock_gettime": lambda clock, /: _now(),
        "clock_gettime_ns": lambda clock, /: _wall_ns(),
    }
    for name in ("monotonic", "perf_counter", "process_time", "thread_time"):
        replacements[name] = lambda: _tick() / 10**9
        replacements[f"{name}_ns"] = _tick
    for name, function in replacements.items():
        setattr(time, name, function)


class _Any(type):
    """Instances of the real classes count as instances of the patched ones."""

    _real: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls._real)


class _Date(datetime.date, metaclass=_Any):
    _real = datetime.date

    @classmethod
    def today(cls) -> Any:
        moment = _real_gmtime(_now())
        return cls(moment.tm_year, moment.tm_mon, moment.tm_mday)


class _Datetime(datetime.datetime, metaclass=_Any):
    _real = datetime.datetime

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return cls.fromtimestamp(_now(), tz) if tz else cls.utcnow()

    @classmethod
    def utcnow(cls) -> Any:
        return cls.fromtimestamp(_now(), datetime.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> Any:
        return cls.utcnow()


def _patch_datetime() -> None:
    _Date.__name__ = _Date.__qualname__ = "date"
    _Datetime.__name__ = _Datetime.__qualname__ = "datetime"
    _Date.__module__ = _Datetime.__module__ = "datetime"
    datetime.date = _Date  # type: ignore[misc]
    datetime.datetime = _Datetime  # type: ignore[misc]
