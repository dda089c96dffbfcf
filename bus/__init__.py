"""The wire of SPADE: typed messages, streams, one client, an embedded broker.

``serve`` runs a broker, ``provision`` creates what a run needs on it, ``connect`` gives a ``Bus``
(``MemoryBus`` is the same in one process). What a Bus promises stands at :class:`bus.interface.Bus`.
"""

from bus.client import NatsBus, connect
from bus.codec import Envelope
from bus.entry import Limits
from bus.errors import BusError, BusUnavailable, Conflict, Denied, NotFound, Undecodable
from bus.interface import Bus, Delivery, Lease, Present, Record, StreamInfo
from bus.memory import MemoryBus
from bus.provision import provision
from bus.server import ServerHandle, serve

__all__ = [
    "Bus",
    "BusError",
    "BusUnavailable",
    "Conflict",
    "Delivery",
    "Denied",
    "Envelope",
    "Lease",
    "Limits",
    "MemoryBus",
    "NatsBus",
    "NotFound",
    "Present",
    "Record",
    "ServerHandle",
    "StreamInfo",
    "Undecodable",
    "connect",
    "provision",
    "serve",
]
