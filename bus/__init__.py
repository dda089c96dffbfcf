"""Transport of SPADE: typed messages, streams, one client, an embedded broker.

``serve`` runs a broker, ``provision`` creates the streams of a run on it, ``connect`` returns a ``Bus``.
The methods of :class:`bus.client.Bus` state the guarantees.
"""

from bus.client import Bus, connect
from bus.codec import Envelope
from bus.errors import BusError, BusUnavailable, Conflict, Denied, NotFound, Undecodable
from bus.objects import Blobs
from bus.provision import provision
from bus.publisher import Limits
from bus.reads import Record, StreamInfo
from bus.server import ServerHandle, serve
from bus.state import Lease
from bus.work import Delivery

__all__ = [
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
    "NotFound",
    "Record",
    "ServerHandle",
    "StreamInfo",
    "Undecodable",
    "connect",
    "provision",
    "serve",
]
