"""The wire of SPADE: typed messages, streams, one client, an embedded broker."""

from bus.client import NatsBus, connect
from bus.codec import Envelope
from bus.errors import BusError, BusUnavailable, Conflict, NotFound, Undecodable
from bus.face import Bus, Delivery, Lease, Record, StreamInfo
from bus.memory import MemoryBus
from bus.provision import provision
from bus.publish import Limits
from bus.server import ServerHandle, serve

__all__ = [
    "Bus",
    "BusError",
    "BusUnavailable",
    "Conflict",
    "Delivery",
    "Envelope",
    "Lease",
    "Limits",
    "MemoryBus",
    "NatsBus",
    "NotFound",
    "Record",
    "ServerHandle",
    "StreamInfo",
    "Undecodable",
    "connect",
    "provision",
    "serve",
]
