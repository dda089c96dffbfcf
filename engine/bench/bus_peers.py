"""Other ways from one process to another, each used as its own manual would use it for speed.

They carry the same frames (made and read by ``bus.codec``) as our paths do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from bus import codec
from bus.messages import Message
from engine.bench.bus_job import Outcome
from engine.bench.bus_load import Sink, Supply, encode

_WINDOW = 64
_WINDOW_BYTES = 16 << 20
_POLL_SECONDS = 0.001
_STREAM, _GROUP, _FIELD = "bench", "bench", b"f"


Sent = tuple[str, bytes]
# Stores a message unless its id was stored in the last two minutes, as our streams do.
_ONCE = """
if redis.call('SET', KEYS[2], 1, 'NX', 'EX', 120) then
  return redis.call('XADD', KEYS[1], '*', 'f', ARGV[1])
end
return false
"""


class PeerProducer(Protocol):
    """Sends frames; :meth:`put` returns when they are accepted with the peer's durability."""

    def put(self, messages: list[Sent]) -> None:
        """Send a window of frames, each with the id of its message."""

    def close(self) -> None:
        """Give up the connection."""


class PeerConsumer(Protocol):
    """Receives windows of frames, acknowledged as they are taken from the iterator's next step."""

    def windows(self) -> Iterator[list[bytes]]:
        """Yield windows of frames for ever; asking for the next one acknowledges the last one."""

    def close(self) -> None:
        """Give up the connection."""


class Sender:
    """A peer's producer behind the face of ours."""

    def __init__(self, peer: PeerProducer, size: int) -> None:
        self._peer = peer
        self._window = max(1, min(_WINDOW, _WINDOW_BYTES // size))

    async def send_all(self, supply: Supply, deadline: float) -> None:
        """Send until the deadline, then what tells the consumer that it was all."""
        while time.monotonic() < deadline:
            messages = supply.until(deadline, self._window)
            self._peer.put([(message.key, encode(message)) for message in messages])
        await self.send(supply.make(last=True))

    async def send(self, message: Message) -> None:
        """Send one message."""
        self._peer.put([(message.key, encode(message))])


def take(peer: PeerConsumer, sink: Sink) -> Outcome:
    """Take everything that is sent; the last window is acknowledged as well."""
    print("ready", flush=True)
    for window in peer.windows():
        for frame in window:
            sink.take(*codec.decode(frame))
    return sink.outcome()


class ZmqProducer:
    """PUSH over loopback TCP: nothing is stored, nobody acknowledges."""

    def __init__(self, where: dict[str, Any]) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.connect(where["url"])

    def put(self, messages: list[Sent]) -> None:
        for _, frame in messages:
            self._socket.send(frame)

    def close(self) -> None:
        self._socket.close(linger=10_000)
        self._context.term()


class ZmqConsumer:
    """PULL, bound to the address of the case."""

    def __init__(self, where: dict[str, Any], sink: Sink) -> None:
        import zmq

        self._sink = sink
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.bind(where["url"])

    def windows(self) -> Iterator[list[bytes]]:
        while not self._sink.done:
            yield [self._socket.recv()]

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def _redis(where: dict[str, Any]) -> Any:
    import redis

    return redis.Redis(host="127.0.0.1", port=where["port"])


class RedisProducer:
    """XADD in pipelines of a window, which ends when the server has answered all of them. With ``once``
    a message that is sent again is not stored again.
    """

    def __init__(self, where: dict[str, Any]) -> None:
        self._client = _redis(where)
        self._once = self._client.register_script(_ONCE) if where["once"] else None
        if self._once is not None:
            self._client.script_load(_ONCE)

    def put(self, messages: list[Sent]) -> None:
        pipeline = self._client.pipeline(transaction=False) if len(messages) > 1 else self._client
        for key, frame in messages:
            if self._once is not None:
                pipeline.evalsha(self._once.sha, 2, _STREAM, key, frame)
            else:
                pipeline.xadd(_STREAM, {_FIELD: frame})
        if len(messages) > 1:
            pipeline.execute()

    def close(self) -> None:
        self._client.close()


class RedisConsumer:
    """XREADGROUP of a window, then XACK and XDEL of it: the stream stays as short as ours."""

    def __init__(self, where: dict[str, Any], sink: Sink) -> None:
        self._client, self._sink = _redis(where), sink
        self._client.xgroup_create(_STREAM, _GROUP, id="0", mkstream=True)

    def windows(self) -> Iterator[list[bytes]]:
        while not self._sink.done:
            found = self._client.xreadgroup(_GROUP, "one", {_STREAM: ">"}, count=_WINDOW, block=1000)
            if not found:
                continue
            # redis-py answers a list of (stream, entries), its third protocol a mapping with one more list.
            entries = found[0][1] if isinstance(found, list) else next(iter(found.values()))[0]
            yield [fields[_FIELD] for _, fields in entries]
            names = [name for name, _ in entries]
            pipeline = self._client.pipeline(transaction=False)
            pipeline.xack(_STREAM, _GROUP, *names)
            pipeline.xdel(_STREAM, *names)
            pipeline.execute()

    def close(self) -> None:
        self._client.close()


class FilesProducer:
    """A file a message, renamed into place. With ``sync`` each file is forced to disk before, and the
    directory after each window.
    """

    def __init__(self, where: dict[str, Any]) -> None:
        self._directory, self._sync = Path(where["directory"]), bool(where["sync"])
        self._number = 0
        self._handle = os.open(self._directory, os.O_RDONLY)

    def put(self, messages: list[Sent]) -> None:
        written = [self._write(frame) for _, frame in messages]
        for scratch in written:
            os.rename(scratch, scratch[: -len(".tmp")])
        if self._sync:
            os.fsync(self._handle)

    def _write(self, frame: bytes) -> str:
        scratch = f"{self._directory}/{self._number:09d}.tmp"
        self._number += 1
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, frame)
            if self._sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return scratch

    def close(self) -> None:
        os.close(self._handle)


class FilesConsumer:
    """Looks into the directory every millisecond; a file that was read is removed."""

    def __init__(self, where: dict[str, Any], sink: Sink) -> None:
        self._directory, self._sink = Path(where["directory"]), sink

    def windows(self) -> Iterator[list[bytes]]:
        while not self._sink.done:
            names = sorted(name for name in os.listdir(self._directory) if not name.endswith(".tmp"))
            if not names:
                time.sleep(_POLL_SECONDS)
            for name in names:
                path = f"{self._directory}/{name}"
                with open(path, "rb", buffering=0) as file:
                    yield [file.read()]
                os.unlink(path)

    def close(self) -> None:
        return


PRODUCERS: dict[str, type[ZmqProducer | RedisProducer | FilesProducer]] = {
    "zmq": ZmqProducer,
    "redis": RedisProducer,
    "files": FilesProducer,
}
CONSUMERS: dict[str, type[ZmqConsumer | RedisConsumer | FilesConsumer]] = {
    "zmq": ZmqConsumer,
    "redis": RedisConsumer,
    "files": FilesConsumer,
}


def installed(modules: Iterable[str]) -> str:
    """Return the name of the first module that is not installed, else nothing."""
    import importlib.util

    return next((module for module in modules if importlib.util.find_spec(module) is None), "")
