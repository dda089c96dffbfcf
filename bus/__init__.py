"""Transport of SPADE: typed messages, streams, one client, an embedded broker.

``serve`` runs a broker, ``provision`` creates the streams of a run on it, ``connect`` returns a ``Bus``.
:class:`bus.interface.Bus` states the guarantees.
"""

from bus.client import NatsBus, connect
from bus.codec import Envelope
from bus.errors import BusError, BusUnavailable, Conflict, Denied, NotFound, Undecodable
from bus.interface import Bus, Delivery, Lease, Record, StreamInfo
from bus.provision import provision
from bus.publisher import Limits
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
