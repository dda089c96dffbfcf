"""What the machine itself allows: copying memory, loopback TCP, bytes through the server, fsync.

The server's ceiling is measured without a client library: prepared PUB lines in large writes on one side,
a subscriber that counts bytes on the other.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from typing import Any
from urllib.parse import urlsplit

from engine.bench.bus_job import Job, Outcome

_CHUNK = 1 << 20
_FLIGHT_BYTES = 16 << 20
_SUBJECT = "bench.raw"
_COPY_BYTES = 64 << 20


def run(job: Job) -> Outcome:
    """Do one side of a ceiling's case."""
    return _SIDES[job.side](job)


def _copy(job: Job) -> Outcome:
    """Copy 64 MiB (more than the caches hold) again and again."""
    source, target = bytearray(_COPY_BYTES), bytearray(_COPY_BYTES)
    first, rounds = time.monotonic(), 0
    while time.monotonic() < first + job.seconds:
        memoryview(target)[:] = source
        rounds += 1
    return Outcome(messages=rounds, bytes=rounds * _COPY_BYTES, first=first, last=time.monotonic())


def _fsync(job: Job) -> Outcome:
    """Append ``size`` bytes and force them to disk, again and again."""
    taken: list[float] = []
    descriptor = os.open(job.where["file"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        first = time.monotonic()
        while time.monotonic() < first + job.seconds:
            began = time.perf_counter()
            os.write(descriptor, bytes(job.size))
            os.fsync(descriptor)
            taken.append(1e3 * (time.perf_counter() - began))
    finally:
        os.close(descriptor)
    return Outcome(messages=len(taken), first=first, last=time.monotonic(), milliseconds=taken)


def _tcp_send(job: Job) -> Outcome:
    with socket.create_connection(("127.0.0.1", job.where["port"])) as stream:
        _go()
        block, sent, first = bytes(_CHUNK), 0, time.monotonic()
        while time.monotonic() < first + job.seconds:
            stream.sendall(block)
            sent += _CHUNK
    return Outcome(messages=sent // _CHUNK, bytes=sent, first=first, last=time.monotonic())


def _tcp_receive(job: Job) -> Outcome:
    with socket.create_server(("127.0.0.1", job.where["port"])) as listener:
        print("ready", flush=True)
        stream, _ = listener.accept()
        buffer, received = bytearray(_CHUNK), 0
        with stream:
            while got := stream.recv_into(buffer):
                received += got
    return Outcome(messages=received // _CHUNK, bytes=received, last=time.monotonic())


def _connect(where: dict[str, Any], *more: bytes) -> socket.socket:
    """Return a connection that the server has accepted, with ``more`` commands behind it."""
    address = urlsplit(where["url"])
    stream = socket.create_connection((address.hostname or "", address.port or 4222))
    hello = json.dumps({"verbose": False, "pedantic": False, "auth_token": where["token"], "protocol": 1})
    stream.sendall(b"CONNECT " + hello.encode() + b"\r\n" + b"".join(more) + b"PING\r\n")
    answer = b""
    while b"PONG\r\n" not in answer:
        got = stream.recv(65536)
        if not got or b"-ERR" in got:
            raise ConnectionError(f"the server refused the connection: {(answer + got)[-200:]!r}")
        answer += got
    return stream


def _progress(path: str) -> mmap.mmap:
    """Return eight bytes that both sides see: how much was received."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 8)
    finally:
        os.close(descriptor)


def _raw_publish(job: Job) -> Outcome:
    line = f"PUB {_SUBJECT} {job.size}\r\n".encode() + b"x" * job.size + b"\r\n"
    end = line[: -job.size - 2] + b"E" * job.size + b"\r\n"
    many = max(1, _CHUNK // len(line))
    block, flight, sent = line * many, max(2 * many, _FLIGHT_BYTES // job.size), 0
    with _connect(job.where) as stream, _progress(job.where["progress"]) as seen:
        _go()
        first = time.monotonic()
        while time.monotonic() < first + job.seconds:
            # A subscriber far behind would be thrown out by the server.
            while sent - struct.unpack("q", seen[:8])[0] > flight:
                time.sleep(0.0001)
            stream.sendall(block)
            sent += many
        stream.sendall(end)
        # The server reads nothing from a client that has gone: stay until all has arrived.
        limit = time.monotonic() + 10.0
        while struct.unpack("q", seen[:8])[0] <= sent and time.monotonic() < limit:
            time.sleep(0.001)
    return Outcome(messages=sent + 1, first=first, last=time.monotonic())


def _raw_subscribe(job: Job) -> Outcome:
    length = len(f"MSG {_SUBJECT} 1 {job.size}\r\n") + job.size + 2
    received, tail, buffer = 0, b"", bytearray(_CHUNK)
    with (
        _connect(job.where, f"SUB {_SUBJECT} 1\r\n".encode()) as stream,
        _progress(job.where["progress"]) as seen,
    ):
        print("ready", flush=True)
        while got := stream.recv_into(buffer):
            received += got
            seen[:8] = struct.pack("q", received // length)
            tail = (tail + bytes(buffer[max(0, got - 3) : got]))[-3:]
            if tail == b"E\r\n":
                break
    return Outcome(messages=received // length, bytes=received, last=time.monotonic())


def _go() -> None:
    """Tell that this side is connected and wait for the start."""
    print("ready", flush=True)
    input()


_SIDES = {
    "memcpy": _copy,
    "fsync": _fsync,
    "tcp_send": _tcp_send,
    "tcp_receive": _tcp_receive,
    "raw_produce": _raw_publish,
    "raw_consume": _raw_subscribe,
}
