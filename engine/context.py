"""The context that a host gives to a role. ``roles.base`` re-exports it for authors of roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import structlog

from bus import Bus
from engine.config import Config


@dataclass(frozen=True)
class RoleContext:
    """The recipe, the bus and the services of one role.

    ``directory`` is the run directory, or a scratch one on another host. ``shared`` holds the services of the
    process (``"pool"``: InferencePool, ``"sandbox"``:
    SandboxPool), built by the host of the roles before they start.
    """

    config: Config
    bus: Bus
    directory: Path
    instance: str
    log: structlog.stdlib.BoundLogger
    draining: anyio.Event = field(default_factory=anyio.Event)
    shared: Mapping[str, Any] = field(default_factory=dict)
