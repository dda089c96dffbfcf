"""The base class of roles: context, settings and lifecycle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from engine import registry
from engine.config import Config
from engine.context import RoleContext

__all__ = ["Role", "RoleContext"]


class Role(ABC):
    """A coroutine on the bus, found through the entry-point group ``spade.roles``.

    ``needs`` names the shared services its process must offer. ``own_process`` roles are started by the
    supervisor as ``spade role NAME --connect URL``; the others share the supervisor's event loop.
    ``settings_type`` is the Struct of the recipe's table ``[plugins.NAME]``; ``self.settings`` is its value.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    own_process: ClassVar[bool] = False
    settings_type: ClassVar[type[msgspec.Struct] | None] = None

    def __init__(self, context: RoleContext) -> None:
        self.context = context
        self.config = context.config
        self.settings: Any = (
            registry.settings(context.config.plugins, self.name, self.settings_type)
            if self.settings_type
            else None
        )
        self.bus = context.bus
        self.log = context.log

    @classmethod  # noqa: B027 - most roles need nothing more
    def check(cls, config: Config) -> None:
        """Look, before anything is started, for what the role will need beyond the recipe's own rules.

        Raises ConfigError. Called on the host that will run the role; files may be read, nothing is changed.
        """

    @abstractmethod
    async def run(self) -> None:
        """Work until ``context.draining`` is set, finish or hand back what is in hand, return.

        An exception ends the run: the supervisor reports it and stops the other roles.
        """

    @property
    def slots(self) -> int:
        """The number of tasks that the role takes at once; 0 when it takes none."""
        return 0

    @property
    def version(self) -> int:
        """The packed policy version the role works with; -1 when it has none."""
        return -1

    def statistics(self) -> dict[str, float]:
        """Gauges for heartbeats and the live view: queue depths, counts, rates."""
        return {}
