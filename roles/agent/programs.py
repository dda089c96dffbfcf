"""The programs of environments, each read once from the fact that published it."""

from __future__ import annotations

from collections import OrderedDict

import anyio

from bus import Bus
from bus.messages import EnvironmentReady, program_subject
from sandbox import InfraFailure

_KEPT = 1024


class Programs:
    """Programs by digest; the ones used last are kept."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._sources: OrderedDict[str, str] = OrderedDict()
        self._lock = anyio.Lock()

    async def source(self, environment: str) -> str:
        """Return the program with this digest. Raises InfraFailure when no fact holds it."""
        async with self._lock:
            if environment not in self._sources:
                record = await self._bus.last(program_subject(environment))
                fact = record.message if record else None
                if not isinstance(fact, EnvironmentReady) or fact.environment != environment:
                    raise InfraFailure(
                        f"the stream EVENT has no program {environment[:12]}: its bound has dropped it; "
                        "raise bus.store_gb"
                    )
                self._sources[environment] = fact.source
            self._sources.move_to_end(environment)
            while len(self._sources) > _KEPT:
                self._sources.popitem(last=False)
            return self._sources[environment]
