"""Publishing that ends in a PubAck or in an error, never in doubt that nobody sees.

Each stream has a window of messages that are written but not acknowledged. An unanswered message is
written again with the same id until the server answers; while the server is away the window is frozen.
A full stream is back-pressure: the message waits and is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from time import monotonic

import anyio
import msgspec

from bus.connection import Connection, status_of
from bus.entry import ID, Entry, Fault, Limits, PubAck, Window, head_of
from bus.errors import BusError, BusUnavailable, Conflict, Denied, NotFound
from bus.fullness import Fullness, remedy
from bus.lane import Arrival, read_headers
from bus.reads import find_stored

log = logging.getLogger("spade.bus")
# "Store failed" has one code for all its causes; a limit that was reached says "maximum ... exceeded".
STORE_FAILED = 10077
# No leader, no quorum, or a message of this id is on its way into the copies of the stream.
UNREADY = frozenset({10008, 10009, 10158})
CONFLICT = 10071
STORE_FULL = frozenset({10002, 10023, 10028, 10047})
_DIAGNOSIS_SECONDS = 2.0
_HEAD_ROOM = 256
# The server recognises an id for 120 s (``bus.subjects``); after that we look for ourselves.
_DOUBT_SECONDS = 100.0
_ABSENT_REMEDY = "Has the run been provisioned? A full disk can switch JetStream off."
DISK_REMEDY = "Free disk space or raise bus.store_gb, then start the run again."


class Publisher:
    """The one way into streams. :meth:`run` must be running."""

    def __init__(self, connection: Connection, limits: Limits | None = None) -> None:
        self._connection = connection
        self.limits = limits or Limits()
        self._prefix = f"{connection.inbox}.ack."
        self._prefix_length = len(self._prefix)
        self._entries: dict[str, Entry] = {}
        self._windows: dict[str, Window] = {}
        self._wake = anyio.Event()
        self._planned = self._next_diagnosis = 0.0
        self._serial = 0
        self._fullness = Fullness()
        self._counts = dict.fromkeys(
            ("stored", "duplicates", "retries", "full", "absent", "unanswered", "conflicts", "failed"), 0.0
        )
        self._ack_decoder = msgspec.json.Decoder(PubAck)

    async def open(self) -> None:
        """Subscribe to the answers."""
        await self._connection.subscribe(f"{self._prefix}*", self._on_answer)

    async def run(self) -> None:
        """Write again what is due, for ever."""
        unwatch = self._connection.watch(self._on_state)
        unwatch_denied = self._connection.watch_denied(self._on_denied)
        try:
            while True:
                await self._tick()
        finally:
            unwatch()
            unwatch_denied()

    async def send(
        self, stream: str, subject: str, payload: bytes, headers: dict[str, str], *, message_id: str
    ) -> PubAck:
        """Store one message; return its PubAck. ``stream`` is the server's stream name.

        Raises Conflict for a lost compare-and-set, BusUnavailable, or BusError (refused, disk full).
        """
        entry = await self.submit(stream, subject, payload, headers, message_id=message_id)
        return (await self.collect([entry]))[0]

    async def submit(
        self,
        stream: str,
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None = None,
        *,
        message_id: str,
    ) -> Entry:
        """Write one message as soon as the window has room; :meth:`collect` waits for its answer."""
        entry = self.offer(stream, subject, payload, headers, message_id=message_id)
        if entry is not None:
            return entry
        size = len(payload) + _HEAD_ROOM
        window = self._window(stream)
        if window.waiting or not self._has_room(window, size):
            await self._enter(window, size)
        entry, now = self._entry(window, stream, subject, payload, head_of(message_id, headers))
        try:
            if self._connection.away_since is not None:
                self._check_away(subject)
            if self._connection.crowded:
                await self._connection.uncrowded()
                if entry.tries or entry.ended:
                    return entry  # the loop has seen to it meanwhile
            self._write(entry, now)
        except BaseException:
            self._forget(entry)
            raise
        return entry

    def offer(
        self,
        stream: str,
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None = None,
        *,
        message_id: str,
    ) -> Entry | None:
        """Write one message now, as :meth:`submit` does; None when it would have to wait."""
        size = len(payload) + _HEAD_ROOM
        connection = self._connection
        if size > connection.client._max_payload:
            raise self._too_large(subject, size)
        window = self._window(stream)
        if (
            window.waiting
            or not self._has_room(window, size)
            or connection.crowded
            or not connection.connected
        ):
            return None
        entry, now = self._entry(window, stream, subject, payload, head_of(message_id, headers))
        try:
            self._write(entry, now)
        except BaseException:
            self._forget(entry)
            raise
        return entry

    def _window(self, stream: str) -> Window:
        window = self._windows.get(stream)
        if window is None:
            window = self._windows[stream] = Window()
        return window

    def _entry(
        self, window: Window, stream: str, subject: str, payload: bytes, head: bytes
    ) -> tuple[Entry, float]:
        """Give a message its place in the window; return it and the time."""
        size = len(payload) + _HEAD_ROOM
        window.messages += 1
        window.bytes += size
        self._serial += 1
        now = monotonic()
        token = f"{self._serial:x}"
        entry = Entry(stream, subject, payload, head, token, size, now, now, window)
        self._entries[token] = entry
        return entry, now

    def statistics(self) -> dict[str, float]:
        """Return the use of the windows and counters."""
        windows = self._windows.values()
        return {
            "publish_in_flight": float(sum(window.messages for window in windows)),
            "publish_in_flight_bytes": float(sum(window.bytes for window in windows)),
            "publish_waiting": float(sum(len(window.waiting) for window in windows)),
            **{f"publish_{name}": value for name, value in self._counts.items()},
        }

    async def collect(self, entries: list[Entry]) -> list[PubAck]:
        """Return the answers to submitted messages; raises the first failure when all have ended."""
        answers: list[PubAck] = []
        failure: BusError | None = None
        try:
            for entry in entries:
                if entry.answer is None and entry.error is None:
                    await self._ended(entry)
                if entry.answer is not None:
                    answers.append(entry.answer)
                else:
                    failure = failure or entry.error
        finally:
            self.abandon(entries)
        if failure is not None:
            raise failure
        return answers

    @staticmethod
    async def _ended(entry: Entry) -> None:
        """Return when an entry has an answer or an error."""
        entry.waiter = asyncio.get_running_loop().create_future()
        try:
            await entry.waiter
        finally:
            entry.waiter = None

    def abandon(self, entries: list[Entry]) -> None:
        """Stop caring for submitted messages; those without an answer may or may not be stored."""
        for entry in entries:
            if entry.token in self._entries:
                self._forget(entry)

    def _check_away(self, subject: str) -> None:
        """Fail at once when the server has been away for longer than anybody's patience."""
        away, patience = self._connection.away_since, self._connection.patience
        if away is not None and monotonic() - away > patience:
            raise BusUnavailable(f"PubAck of {subject}", patience)

    # The window.

    def _too_large(self, subject: str, size: int) -> BusError:
        most = self._connection.client.max_payload
        return BusError(
            f"a message of {size} bytes for {subject} exceeds the server's {most} bytes",
            remedy="Raise bus.max_payload_mb.",
        )

    def _has_room(self, window: Window, size: int) -> bool:
        if window.messages == 0:
            return True
        return window.messages < self.limits.window and window.bytes + size <= self.limits.window_bytes

    async def _enter(self, window: Window, size: int) -> None:
        """Return when it is our turn and the window has room."""
        turn = asyncio.get_running_loop().create_future()
        window.waiting.append(turn)
        try:
            while window.waiting[0] is not turn or not self._has_room(window, size):
                await turn
                turn = self._renew(window, turn)
        finally:
            window.waiting.remove(turn)
            self._call_next(window)

    @staticmethod
    def _renew(window: Window, turn: asyncio.Future[None]) -> asyncio.Future[None]:
        fresh: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        window.waiting[window.waiting.index(turn)] = fresh
        return fresh

    @staticmethod
    def _call_next(window: Window) -> None:
        if window.waiting and not window.waiting[0].done():
            window.waiting[0].set_result(None)

    def _forget(self, entry: Entry) -> None:
        """Take an entry out of its window; without effect the second time."""
        if self._entries.pop(entry.token, None) is None:
            return
        entry.payload = b""  # whoever collects many answers keeps the entries
        window = entry.window
        window.messages -= 1
        window.bytes -= entry.size
        if window.waiting:
            self._call_next(window)
        if entry.waiter is not None and not entry.ended:
            entry.waiter.cancel()

    # Writing.

    def _write(self, entry: Entry, now: float) -> None:
        """Write an entry if there is a server; what is lost on the way falls due again."""
        connection = self._connection
        entry.due = now + self.limits.ack_seconds
        if not connection.write(entry.subject, entry.payload, self._prefix + entry.token, entry.head):
            connection.check_open(f"PubAck of {entry.subject}")
            return
        if entry.tries:
            self._counts["retries"] += 1
        entry.tries += 1
        if not entry.unsure:
            entry.written, entry.floor = now, entry.window.floor
        entry.unsure += 1

    def _on_state(self) -> None:
        """Freeze the window on a disconnect, write all of it again on a connect."""
        now = monotonic()
        for entry in self._entries.values():
            entry.refused, entry.unanswered, entry.absent_since, entry.due = True, 0, 0.0, now
        self._wake.set()

    def _on_denied(self, error: Denied) -> None:
        """End what the server does not let us publish; it names the subject, nothing else answers."""
        for entry in list(self._entries.values()):
            if error.action == "publish" and error.concerns(entry.subject):
                self._fail(entry, Denied("publish", entry.subject))

    async def _tick(self) -> None:
        self._wake = anyio.Event()
        now = monotonic()
        frozen = not self._connection.connected
        due = [entry for entry in self._entries.values() if frozen or entry.due <= now]
        for entry in due:
            if self._connection.closed:
                self._fail(entry, BusUnavailable(f"PubAck of {entry.subject}", now - entry.born))
            elif frozen:
                self._check_patience(entry, now)
            elif entry.token in self._entries:
                await self._again(entry)
        await self._give_up()
        if self._connection.clustered:
            await self._give_up_absent()
        now = monotonic()
        next_due = min((entry.due for entry in self._entries.values()), default=now + 60.0)
        self._planned = now + min(self.limits.ack_seconds / 2, 1.0 if frozen else max(0.005, next_due - now))
        with anyio.move_on_after(self._planned - now):
            await self._wake.wait()

    def _check_patience(self, entry: Entry, now: float) -> None:
        """Fail what waits for a server that has been away for longer than the patience; how long an
        entry had waited before, in a full stream for instance, does not count.
        """
        away, patience = self._connection.away_since, self._connection.patience
        if away is not None and now - away > patience:
            self._fail(entry, BusUnavailable(f"PubAck of {entry.subject}", patience))

    async def _again(self, entry: Entry) -> None:
        if entry.refused:
            entry.refused = False
        elif entry.tries:
            entry.unanswered += 1
            self._counts["unanswered"] += 1
        if entry.unanswered > self.limits.unanswered:
            return
        if entry.unsure and monotonic() - entry.written > _DOUBT_SECONDS and await self._was_stored(entry):
            return
        if self._connection.crowded:
            await self._connection.uncrowded()
        if entry.size > self._connection.client.max_payload:
            self._fail(entry, self._too_large(entry.subject, entry.size))
        if entry.token in self._entries:
            self._write(entry, monotonic())

    async def _was_stored(self, entry: Entry) -> bool:
        """Whether a message lies in the stream that was written too long ago for the server to know."""
        message_id = read_headers(entry.head)[ID]
        try:
            found = await find_stored(
                self._connection, entry.stream, entry.subject, message_id, after=entry.floor
            )
        except BusError as error:
            log.debug("whether %s is stored cannot be found out: %s", entry.subject, error)
            return False
        if found is None:
            entry.unsure = 0
        elif entry.token in self._entries:
            self._finish(entry, PubAck(stream=entry.stream, seq=found, duplicate=True))
        return found is not None

    async def _give_up(self) -> None:
        """Fail what the server leaves unanswered though it is there, after a look at the stream."""
        silent = [entry for entry in self._entries.values() if entry.unanswered > self.limits.unanswered]
        for stream in dict.fromkeys(entry.stream for entry in silent):
            missing = await self._is_missing(stream)
            for entry in silent:
                if entry.stream == stream and entry.unanswered > self.limits.unanswered:
                    self._fail(entry, self._unanswered(entry, missing))

    async def _give_up_absent(self) -> None:
        """In a cluster: fail what waits for a stream that does not exist; others wait for a leader."""
        limit, now = self.limits.absent_seconds, monotonic()
        absent = [
            one for one in self._entries.values() if one.absent_since and now - one.absent_since > limit
        ]
        if not absent or now < self._next_diagnosis:
            return
        for stream in dict.fromkeys(entry.stream for entry in absent):
            if await self._is_missing(stream):
                for entry in absent:
                    if entry.stream == stream and not entry.ended:
                        what = f"no stream takes {entry.subject}"
                        self._fail(entry, BusError(what, remedy=_ABSENT_REMEDY))
        self._next_diagnosis = monotonic() + _DIAGNOSIS_SECONDS / 4

    async def _is_missing(self, stream: str) -> bool:
        try:
            await self._connection.api(f"STREAM.INFO.{stream}", seconds=_DIAGNOSIS_SECONDS)
        except NotFound:
            return True
        except BusError:
            return False
        return False

    def _unanswered(self, entry: Entry, missing: bool) -> BusError:
        if missing:
            return BusError(
                f"no stream takes {entry.subject}, though somebody listens on it",
                remedy="Has the run been provisioned?",
            )
        waited = self.limits.unanswered * self.limits.ack_seconds
        return BusError(
            f"the server does not store {entry.subject}: {waited:g} s without an answer",
            remedy=f"A full disk does this; its log says more. {DISK_REMEDY}",
        )

    # Answers.

    def _on_answer(self, message: Arrival) -> None:
        entry = self._entries.get(message.subject[self._prefix_length :])
        if entry is None:
            return
        if not message.data and status_of(message) == "503":
            self._on_absent(entry, f"no stream takes {entry.subject}")
            return
        try:
            answer = self._ack_decoder.decode(message.data)
        except msgspec.DecodeError as error:
            self._fail(entry, BusError(f"the server's answer to {entry.subject} makes no sense: {error}"))
            return
        if answer.error is not None:
            self._on_refusal(entry, answer.error)
            return
        if answer.stream != entry.stream:
            self._fail(entry, BusError(f"{entry.subject} went to stream {answer.stream}, not {entry.stream}"))
            return
        self._finish(entry, answer)

    def _finish(self, entry: Entry, answer: PubAck) -> None:
        self._counts["stored"] += 1
        self._counts["duplicates"] += answer.duplicate
        window = entry.window
        if answer.seq > window.floor:
            window.floor = answer.seq
        entry.answer = answer
        self._wake_waiter(entry)
        self._forget(entry)

    @staticmethod
    def _wake_waiter(entry: Entry) -> None:
        if entry.waiter is not None and not entry.waiter.done():
            entry.waiter.set_result(None)

    def _on_absent(self, entry: Entry, what: str) -> None:
        """Try again for a while: a server that starts, ends or elects a leader has no stream."""
        now = monotonic()
        self._counts["absent"] += 1
        entry.absent_since = entry.absent_since or now
        if now - entry.absent_since > self._connection.election_time(self.limits.absent_seconds):
            self._fail(entry, BusError(what, remedy=_ABSENT_REMEDY))
            return
        self._later(entry, 0.02, 0.25)

    def _on_refusal(self, entry: Entry, fault: Fault) -> None:
        now = monotonic()
        full = fault.err_code == STORE_FAILED and "maximum" in fault.description
        if full:
            self._counts["full"] += 1
            self._fullness.tell(entry.stream, fault.description)
            entry.full_since = entry.full_since or now
            if now - entry.full_since <= self.limits.full_seconds:
                self._later(entry, 0.005, min(0.5, 0.02 * 2 ** min(entry.tries, 5)))
                return
            error: BusError = BusUnavailable(
                f"room in stream {entry.stream}", self.limits.full_seconds, remedy=remedy(entry.stream)
            )
        elif fault.err_code == STORE_FAILED or fault.err_code in UNREADY:
            self._on_absent(entry, f"the server cannot store {entry.subject}: {fault.description}")
            return
        elif fault.err_code == CONFLICT:
            error = Conflict(f"{entry.subject}: {fault.description}")
        elif fault.err_code in STORE_FULL:
            error = BusError(f"the server's store is full: {fault.description}", remedy=DISK_REMEDY)
        else:
            error = BusError(
                f"the server refused {entry.subject}: {fault.description} (code {fault.err_code})"
            )
        self._fail(entry, error)

    def _later(self, entry: Entry, least: float, most: float) -> None:
        entry.refused, entry.unanswered = True, 0
        entry.unsure -= entry.unsure > 0
        entry.due = monotonic() + random.uniform(least, most)
        if entry.due < self._planned:
            self._wake.set()

    def _fail(self, entry: Entry, error: BusError) -> None:
        self._counts["conflicts" if isinstance(error, Conflict) else "failed"] += 1
        entry.error = error
        self._wake_waiter(entry)
        self._forget(entry)
