"""Running programs that a model wrote: contract, confinement, pool, validator.

Imports nothing of ours. Names are resolved on first use, so that the zygote, which imports this package
too, does not carry the engine's side of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox.criteria import read_tools as read_tools
    from sandbox.errors import EnvCrashed as EnvCrashed
    from sandbox.errors import EnvError as EnvError
    from sandbox.errors import EnvFailure as EnvFailure
    from sandbox.errors import EnvMemory as EnvMemory
    from sandbox.errors import EnvProtocolError as EnvProtocolError
    from sandbox.errors import EnvQuarantined as EnvQuarantined
    from sandbox.errors import EnvTimeout as EnvTimeout
    from sandbox.errors import EnvViolation as EnvViolation
    from sandbox.errors import InfraFailure as InfraFailure
    from sandbox.errors import InstanceClosed as InstanceClosed
    from sandbox.errors import SandboxError as SandboxError
    from sandbox.errors import SandboxUnavailable as SandboxUnavailable
    from sandbox.errors import SpawnRefused as SpawnRefused
    from sandbox.frames import StepResult as StepResult
    from sandbox.instance import Instance as Instance
    from sandbox.metadata import Metadata as Metadata
    from sandbox.pool import SandboxPool as SandboxPool
    from sandbox.probes import Transcript as Transcript
    from sandbox.protection import ProtectionReport as ProtectionReport
    from sandbox.settings import SandboxSettings as SandboxSettings
    from sandbox.source import extract as extract
    from sandbox.trial import Rejected as Rejected
    from sandbox.validate import Check as Check
    from sandbox.validate import Validator as Validator
    from sandbox.verdict import REASON_CHARACTERS as REASON_CHARACTERS
    from sandbox.verdict import RUNGS as RUNGS
    from sandbox.verdict import ValidatorSettings as ValidatorSettings
    from sandbox.verdict import Verdict as Verdict

_HOMES = {
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
    **dict.fromkeys(("Check", "Validator"), "validate"),
    **dict.fromkeys(("REASON_CHARACTERS", "RUNGS", "ValidatorSettings", "Verdict"), "verdict"),
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name, "errors")
    found = getattr(importlib.import_module(f"sandbox.{home}"), name, None)
    if found is None:
        raise AttributeError(f"module 'sandbox' has no attribute {name!r}")
    return found
