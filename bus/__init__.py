"""The wire of SPADE: typed messages, streams, one client, an embedded broker."""

from bus.client import NatsBus, connect
from bus.codec import Envelope
from bus.errors import BusError, BusUnavailable, Conflict, Denied, NotFound, Undecodable
from bus.face import Announcement, BlobInfo, Blobs, Bus, Delivery, Lease, Present, Record, StreamInfo
from bus.memory import MemoryBus
from bus.provision import provision
from bus.publish import Limits
from bus.server import ServerHandle, serve

__all__ = [
    "Announcement",
    "BlobInfo",
    "Blobs",
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
