"""Makes a transcript depend on program, seed and actions alone. For honest programs, not for security.

:func:`patch` replaces, once in the zygote, the functions that give entropy, time and facts about the process
by functions of one state; :func:`seed` sets that state in an instance. Addresses remain (``id``, the order
of sets of plain objects): the validator finds programs that depend on those by replay.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import os
import queue
import random
import resource
import sys
import threading
import time
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any

EPOCH_NS = 1_767_225_600 * 10**9  # 2026-01-01T00:00:00Z
TICK_NS = 10**6

_real_seed = random.Random.seed
_real_wait = threading.Condition.wait
_real_gmtime, _real_strftime, _real_asctime = time.gmtime, time.strftime, time.asctime


class _State:
    """``key`` of the entropy stream with its ``counter``; ``clock`` in nanoseconds since the start."""

    key = b""
    counter = 0
    clock = 0


def seed(value: int | str, *, numpy: bool = False) -> None:
    """Restart all streams from ``value`` and the clock from its epoch.

    ``numpy`` False leaves numpy's own stream as the zygote left it, which is the same everywhere, and saves
    an instance that does not use it from copying the generator.
    """
    _State.key = hashlib.sha256(str(value).encode()).digest()
    _State.counter = _State.clock = 0
    number = int.from_bytes(_State.key[:8], "little")
    random.seed(number)
    if numpy and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number & 0xFFFFFFFF)


_replaced: dict[int, tuple[Any, Any]] = {}


def patch() -> None:
    """Replace entropy, clocks and process ids in this interpreter, and seed everything."""
    _patch_entropy()
    _patch_process()
    _patch_time()
    _patch_waits()
    _patch_datetime()
    if numpy := sys.modules.get("numpy"):
        _patch_numpy(numpy)
    _replace_copies()
    seed("zygote", numpy=True)


def _replace(module: ModuleType, **functions: Any) -> None:
    for name, function in functions.items():
        original = getattr(module, name)
        # kept alive, so that no other object gets its id
        _replaced[id(original)] = (original, function)
        setattr(module, name, function)


def _replace_copies() -> None:
    """Replace the originals under every name that another module has given them."""
    for name, module in list(sys.modules.items()):
        if name == "__main__" or name.partition(".")[0] == "sandbox":
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in _replaced and value is not None:
                setattr(module, attribute, _replaced[id(value)][1])


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
    random.Random.seed = _seed_random  # type: ignore[method-assign]
    random.seed = random._inst.seed
    _replace(os, urandom=_stream, getrandom=lambda size, flags=0: _stream(size))
    _replace(
        uuid,
        uuid1=lambda node=None, clock_seq=None: uuid.UUID(bytes=_stream(16), version=1),
        uuid4=lambda: uuid.UUID(bytes=_stream(16), version=4),
        getnode=lambda: 1,
        _generate_time_safe=None,
    )


def _patch_process() -> None:
    """Hide facts that differ from one process to the next: ids, processor, resources, host."""
    for name in ("getuid", "geteuid", "getgid", "getegid"):
        _replace(os, **{name: lambda: 1000})
    _replace(
        os,
        getpid=lambda: 2,
        getppid=lambda: 1,
        getresuid=lambda: (1000, 1000, 1000),
        getresgid=lambda: (1000, 1000, 1000),
        getgroups=list,
        cpu_count=lambda: 1,
        sched_getaffinity=lambda pid, /: {0},
        times=lambda: os.times_result((_tick() / 10**9, 0.0, 0.0, 0.0, _State.clock / 10**9)),
        fstat=_refused,
    )
    _replace(resource, getrusage=_refused)
    _replace(threading, get_native_id=lambda: 2)
    if "platform" in sys.modules:
        # it keeps the name of the host
        sys.modules["platform"]._uname_cache = None  # type: ignore[attr-defined]


def _refused(*_: object) -> Any:
    """Stand in for a function whose results differ from one process to the next."""
    raise PermissionError(errno.EPERM, "not available to programs")


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
    _replace(time, **replacements, pthread_getcpuclockid=_refused)


def _patch_waits() -> None:
    threading.Condition.wait = _wait  # type: ignore[method-assign]
    # the one in C waits by the real clock
    queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[attr-defined,misc]


def _wait(self: threading.Condition, timeout: float | None = None) -> bool:
    """Advance the clock instead of waiting: a program has one thread, so nothing can notify it."""
    if timeout is None:
        return _real_wait(self)
    if not self._is_owned():  # type: ignore[attr-defined]
        raise RuntimeError("cannot wait on un-acquired lock")
    _sleep(max(0.0, timeout))
    return False


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
    _replace(datetime, date=_Date, datetime=_Datetime)


def _patch_numpy(numpy: Any) -> None:
    real = numpy.datetime64

    class Datetime64(real, metaclass=_Any):  # type: ignore[misc,valid-type]
        """Reads "now" and "today" off our clock; its values are those of the real class."""

        _real = real

        def __new__(cls, *arguments: Any) -> Any:
            word = str(arguments[0]).lower() if arguments else ""
            if word == "now":
                arguments = (_Datetime.utcnow().isoformat(timespec="seconds"), *arguments[1:])
            elif word == "today":
                arguments = (_Date.today().isoformat(), *arguments[1:])
            return real(*arguments)

    Datetime64.__name__ = Datetime64.__qualname__ = "datetime64"
    numpy.datetime64 = Datetime64
