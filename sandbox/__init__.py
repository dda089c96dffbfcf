"""Running programs that a model wrote: contract, confinement, pool, validator.

Imports nothing of ours. Names are resolved on first use, so that the zygote, which imports this package
too, does not carry the engine's side of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox.criteria import read_tools
    from sandbox.errors import (
        EnvCrashed,
        EnvError,
        EnvFailure,
        EnvMemory,
        EnvProtocolError,
        EnvQuarantined,
        EnvTimeout,
        EnvViolation,
        InfraFailure,
        InstanceClosed,
        SandboxError,
        SandboxUnavailable,
        SpawnRefused,
    )
    from sandbox.frames import ResetResult, StepResult
    from sandbox.instance import Instance
    from sandbox.metadata import Metadata
    from sandbox.pool import SandboxPool
    from sandbox.probes import Transcript
    from sandbox.protection import ProtectionReport
    from sandbox.settings import SandboxSettings
    from sandbox.source import extract
    from sandbox.trial import Rejected
    from sandbox.validate import RUNGS, Check, Program, Validator, ValidatorSettings, Verdict

_ERRORS = (
    *(
        "EnvCrashed",
        "EnvError",
        "EnvFailure",
        "EnvMemory",
        "EnvProtocolError",
        "EnvQuarantined",
        "EnvTimeout",
    ),
    *("EnvViolation", "InfraFailure", "InstanceClosed", "SandboxError", "SandboxUnavailable", "SpawnRefused"),
)
_HOMES = {
    **dict.fromkeys(_ERRORS, "errors"),
    "ResetResult": "frames",
    "StepResult": "frames",
    "Instance": "instance",
    "Metadata": "metadata",
    "SandboxPool": "pool",
    "Transcript": "probes",
    "ProtectionReport": "protection",
    "SandboxSettings": "settings",
    "extract": "source",
    "read_tools": "criteria",
    "Rejected": "trial",
    **dict.fromkeys(("RUNGS", "Check", "Program", "Validator", "ValidatorSettings", "Verdict"), "validate"),
}

__all__ = [
    "RUNGS",
    "Check",
    "EnvCrashed",
    "EnvError",
    "EnvFailure",
    "EnvMemory",
    "EnvProtocolError",
    "EnvQuarantined",
    "EnvTimeout",
    "EnvViolation",
    "InfraFailure",
    "Instance",
    "InstanceClosed",
    "Metadata",
    "Program",
    "ProtectionReport",
    "Rejected",
    "ResetResult",
    "SandboxError",
    "SandboxPool",
    "SandboxSettings",
    "SandboxUnavailable",
    "SpawnRefused",
    "StepResult",
    "Transcript",
    "Validator",
    "ValidatorSettings",
    "Verdict",
    "extract",
    "read_tools",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sandbox' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sandbox.{_HOMES[name]}"), name)
