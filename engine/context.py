"""What a role is given by whoever hosts it. ``roles.base`` hands it on to the roles' authors."""

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
    """What a role is given. ``directory`` is the run directory, or a scratch one on another host.

    ``shared`` holds what the roles of one process share (``"pool"``: InferencePool, ``"sandbox"``:
    SandboxPool), built by the host of the roles before they start.
    """

    config: Config
    bus: Bus
    directory: Path
    instance: str
    log: structlog.stdlib.BoundLogger
    draining: anyio.Event = field(default_factory=anyio.Event)
    shared: Mapping[str, Any] = field(default_factory=dict)
