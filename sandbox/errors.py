"""Errors of a generated program and of the pool that runs it.

Every class has a ``kind``: ``env`` (caused by the program; an outcome with a value), ``quarantined`` (the
program was killed too often before) or ``infra`` (caused by the host; may be retried). After any of them but
:class:`EnvError` the instance is gone.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Kind = Literal["env", "infra", "quarantined"]


class SandboxError(Exception):
    """Base of all errors of this package."""

    kind: ClassVar[Kind] = "infra"


class EnvFailure(SandboxError):
    """Base of the errors that a program causes."""

    kind: ClassVar[Kind] = "env"


class EnvError(EnvFailure):
    """The program raised, or returned a value that the contract forbids; the instance can go on.

    ``type`` is the exception's class name, ``phase`` where it happened (``parse``, ``lint``, ``load``,
    ``init``, ``reset``, ``step``, ``call``) and ``traceback`` the program's own frames.
    """

    def __init__(self, type_: str, message: str, *, phase: str = "", traceback: str = "") -> None:
        self.type, self.message, self.phase, self.traceback = type_, message, phase, traceback
        super().__init__(f"{type_}: {message}" if message else type_)


class EnvTimeout(EnvFailure):
    """The program used up its time.

    ``clock`` is ``cpu`` or ``wall`` (of one call) or ``life`` (CPU time of all calls of the process).
    """

    def __init__(self, clock: Literal["cpu", "wall", "life"], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        used = {
            "cpu": f"a call used its {seconds:g} s of CPU time; do less work per call",
            "wall": f"no answer within {seconds:g} s of wall time; do not sleep or wait in a call",
            "life": f"all calls together used the process's {seconds:g} s of CPU time; do less work per call",
        }
        super().__init__(used[clock])


class EnvCrashed(EnvFailure):
    """The program's process ended: ``signal`` by a signal, else with exit ``code``."""

    def __init__(self, *, signal: int = 0, code: int = 0, reason: str = "") -> None:
        self.signal, self.code = signal, code
        ended = f"the process died by signal {signal}" if signal else f"the process exited with code {code}"
        super().__init__(reason or ended)


class EnvViolation(EnvFailure):
    """The program made a system call that only an attack makes."""


class EnvProtocolError(EnvFailure):
    """The program's process sent something that is not the one reply expected."""


class EnvMemory(EnvFailure):
    """The program reached its memory limit, or held too much of a host that was short of memory."""


class EnvQuarantined(EnvFailure):
    """The program was killed too often (strikes); it is not started again in this pool."""

    kind: ClassVar[Kind] = "quarantined"


class InfraFailure(SandboxError):
    """Base of the errors that no program causes."""


class SpawnRefused(InfraFailure):
    """No instance could be started: queue full, no place or memory in time, a wall could not be taken."""


class InstanceClosed(InfraFailure):
    """The instance was closed from outside the program.

    By its user, by a cancelled call, after a long idle time, because the host was short of memory, or by a
    signal that no program can send.
    """


class SandboxUnavailable(InfraFailure):
    """The pool cannot run anything: too few walls on this host, or its zygotes died.

    ``report`` is the protection report, if one was made.
    """

    def __init__(self, message: str, report: object | None = None) -> None:
        self.report = report
        super().__init__(message)
