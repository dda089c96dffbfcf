"""Many last values of a stream at once: direct requests through a window, answers in the order asked."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from time import monotonic

import anyio
import msgspec
import nats.errors
from nats.aio.msg import Msg

from bus.connection import Connection, status_of
from bus.errors import BusUnavailable, NotFound
from bus.subjects import Names

_AGAIN_SECONDS = 3.0
_SILENT_SECONDS = 60.0
_PAGE = 100_000


async def subjects_of(connection: Connection, stream: str, pattern: str) -> list[str]:
    """Return all subjects of a stream (server's name) that lie in ``pattern``. Raises NotFound."""
    found: list[str] = []
    while True:
        body = {"subjects_filter": pattern, "offset": len(found)}
        answer = await connection.api(f"STREAM.INFO.{stream}", body)
        page = list(answer["state"].get("subjects") or {})
        found += page
        if not page or len(found) >= int(answer.get("total", 0)) or len(page) < _PAGE:
            return found


async def values(
    connection: Connection, stream: str, subjects: Sequence[str], *, window: int
) -> AsyncGenerator[Msg | None, None]:
    """Yield the last message on each subject, None where there is none; at most ``window`` are on the way.

    Close it (``contextlib.aclosing``) when it is left early. Raises BusUnavailable.
    """
    round_ = _Round(connection, stream, subjects)
    subscription = await connection.subscribe(f"{round_.inbox}.*", round_.receive)
    unwatch = connection.watch(round_.ask_again)
    try:
        for index in range(len(subjects)):
            yield await round_.take(index, window)
    finally:
        unwatch()
        with anyio.CancelScope(shield=True):
            await connection.unsubscribe(subscription)


class _Round:
    """The requests and answers of one call of :func:`values`."""

    def __init__(self, connection: Connection, stream: str, subjects: Sequence[str]) -> None:
        self._connection, self._stream, self._subjects = connection, stream, subjects
        self.inbox = f"{connection.inbox}.values.{secrets.token_hex(6)}"
        self._answers: dict[int, Msg | None] = {}
        self._asked = 0
        self._taken = 0
        self._again = False
        self._wake = anyio.Event()

    def receive(self, message: Msg) -> None:
        index = int(message.subject[len(self.inbox) + 1 :])
        status = status_of(message)
        if index < self._taken or status not in ("", "404"):
            return
        self._answers[index] = None if status else message
        self._wake.set()

    def ask_again(self) -> None:
        self._again = True
        self._wake.set()

    async def take(self, index: int, window: int) -> Msg | None:
        began = monotonic()
        while index not in self._answers:
            if monotonic() - began > _SILENT_SECONDS:
                raise BusUnavailable(f"values of {self._stream}", _SILENT_SECONDS)
            self._wake = anyio.Event()
            await self._ask(index, window)
            with anyio.move_on_after(_AGAIN_SECONDS) as scope:
                await self._wake.wait()
            self._again |= scope.cancelled_caught
        self._taken = index + 1
        answer = self._answers.pop(index)
        if index + window < len(self._subjects) and self._asked <= index + window:
            await self._ask(index + 1, window)
        return answer

    async def _ask(self, index: int, window: int) -> None:
        await self._connection.wait_connected(f"connection to read {self._stream}")
        if self._again:
            self._again = False
            for number in range(index, self._asked):
                if number not in self._answers:
                    await self._request(number)
        while self._asked < min(len(self._subjects), index + window):
            self._asked += 1
            await self._request(self._asked - 1)

    async def _request(self, number: int) -> None:
        body = msgspec.json.encode({"last_by_subj": self._subjects[number]})
        with contextlib.suppress(nats.errors.Error, OSError):  # what was not written is asked again
            await self._connection.send(
                f"$JS.API.DIRECT.GET.{self._stream}", body, reply=f"{self.inbox}.{number}"
            )


async def certain(connection: Connection, names: Names, stream: str, request: dict[str, object]) -> bool:
    """Whether a message is stored, by the word of the stream's leader: a copy may lag behind it."""
    try:
        await connection.api(f"STREAM.MSG.GET.{names.stream(stream)}", dict(request))
    except NotFound:
        return False
    return True
