"""What can go wrong with a generated program or with the pool that runs it.

Every class has a ``kind``: ``env`` (the program did it; it has a defined value), ``quarantined`` (the
program did it before) or ``infra`` (ours; may be retried). After any of them but :class:`EnvError` the
instance is gone.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Kind = Literal["env", "infra", "quarantined"]


class SandboxError(Exception):
    """Base of all errors of this package."""

    kind: ClassVar[Kind] = "infra"


class EnvFailure(SandboxError):
    """Base of what a program causes."""

    kind: ClassVar[Kind] = "env"


class EnvError(EnvFailure):
    """The program raised, or returned what the contract forbids; the instance can go on.

    ``type`` is the exception's class name, ``phase`` where it happened (``parse``, ``lint``, ``load``,
    ``init``, ``reset``, ``step``, ``call``) and ``traceback`` the program's own frames.
    """

    def __init__(self, type_: str, message: str, *, phase: str = "", traceback: str = "") -> None:
        self.type, self.message, self.phase, self.traceback = type_, message, phase, traceback
        super().__init__(f"{type_}: {message}" if message else type_)


class EnvTimeout(EnvFailure):
    """The program used up its time. ``clock`` is ``cpu``, ``wall`` or ``life``."""

    def __init__(self, clock: Literal["cpu", "wall", "life"], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        super().__init__(f"no answer within {seconds:g} s of {clock} time")


class EnvCrashed(EnvFailure):
    """The program's process ended: ``signal`` by a signal, else with exit ``code``."""

    def __init__(self, *, signal: int = 0, code: int = 0) -> None:
        self.signal, self.code = signal, code
        super().__init__(f"process died by signal {signal}" if signal else f"process exited with code {code}")


class EnvViolation(EnvFailure):
    """The program made a system call that only an attack makes."""


class EnvProtocolError(EnvFailure):
    """The program's process sent something that is not the one reply expected."""


class EnvMemory(EnvFailure):
    """The program ran into its memory limit."""


class EnvQuarantined(EnvFailure):
    """The program was killed too often (strikes); it is not started again in this pool."""

    kind: ClassVar[Kind] = "quarantined"


class InfraFailure(SandboxError):
    """Base of what is our own fault."""


class SpawnRefused(InfraFailure):
    """No instance now: queue full, no free place in time, memory short, a child could not be confined."""


class InstanceClosed(InfraFailure):
    """The instance was closed: by its user, by a cancelled call, after a long idle time, or because the
    host was short of memory.
    """


class SandboxUnavailable(InfraFailure):
    """The pool cannot run anything: too few walls on this host, or its zygotes died.

    ``report`` is the protection report where there is one.
    """

    def __init__(self, message: str, report: object | None = None) -> None:
        self.report = report
        super().__init__(message)
