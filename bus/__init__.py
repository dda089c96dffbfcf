"""Transport of SPADE: typed messages, streams, one client, an embedded broker.

``serve`` runs a broker, ``provision`` creates the streams of a run on it, ``connect`` returns a ``Bus``.
The methods of :class:`bus.client.Bus` state the guarantees.
"""

from bus.client import Bus as Bus
from bus.client import connect as connect
from bus.codec import Envelope as Envelope
from bus.errors import BusError as BusError
from bus.errors import BusUnavailable as BusUnavailable
from bus.errors import Conflict as Conflict
from bus.errors import Denied as Denied
from bus.errors import NotFound as NotFound
from bus.errors import Undecodable as Undecodable
from bus.objects import Blobs as Blobs
from bus.provision import provision as provision
from bus.publisher import Limits as Limits
from bus.reads import Record as Record
from bus.reads import StreamInfo as StreamInfo
from bus.server import ServerHandle as ServerHandle
from bus.server import serve as serve
from bus.state import Lease as Lease
from bus.work import Delivery as Delivery
