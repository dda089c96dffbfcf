"""How much a server may be asked at once, and whether at all: two pure state machines, no clock."""

from __future__ import annotations


class Aimd:
    """A concurrency limit that grows by about one a round trip and halves on congestion.

    It starts at ``ceiling``: a server sized for its load is used fully from the first request on. One that
    comes back is used like one (:meth:`restart`): from ``floor`` on, doubling with each round trip up to what
    it bore before, so that everybody who waited does not fall upon it at once.

    After a cut, further signals are ignored until as many requests have ended as were in flight then, so that
    one event counts once, however many requests saw it.
    """

    def __init__(self, ceiling: int, *, floor: int = 1, increase: float = 1.0, decrease: float = 0.5) -> None:
        if not 1 <= floor <= ceiling or not 0 < decrease < 1 or increase <= 0:
            raise ValueError(f"impossible limits: {floor}..{ceiling}, +{increase}, *{decrease}")
        self._ceiling, self._floor = ceiling, floor
        self._increase, self._decrease = increase, decrease
        self._value = self._borne = float(ceiling)
        self._immune = self._excused = 0
        self.cuts = 0

    @property
    def limit(self) -> int:
        """The number of requests that may be in flight, within [floor, ceiling]."""
        return int(self._value)

    def ended(self, *, in_flight: int, success: bool) -> None:
        """A request ended while ``in_flight`` were out, itself included. Only a limit that is used grows."""
        self._immune, self._excused = max(0, self._immune - 1), max(0, self._excused - 1)
        if success and not self._immune and 2 * in_flight >= self.limit:
            share = 1.0 if self._value < self._borne else self._value
            self._value = min(self._ceiling, self._value + self._increase / share)

    def congested(self, *, in_flight: int) -> bool:
        """The server queues, preempts or times out. Returns whether this cut the limit."""
        if self._immune or self._excused:
            return False
        self._value = self._borne = max(float(self._floor), self._value * self._decrease)
        self._immune = in_flight
        self.cuts += 1
        return True

    def excuse(self, *, in_flight: int) -> None:
        """Not load made the ``in_flight`` requests queue: no signal counts until they have ended."""
        self._excused = in_flight

    def restart(self) -> None:
        """The server is back: begin at the floor, and soon be where it was."""
        self._borne = max(self._borne, self._value)
        self._value, self._immune = float(self._floor), 0


class Breaker:
    """Opens after ``threshold`` failures in a row; times are seconds of any monotonic clock.

    While open nobody asks the server; from ``retry_at`` on one probe may. A failed probe doubles the
    cool-down up to ``longest``. A probe that succeeds only makes the breaker half-open: ``trial`` requests at
    a time may go, the first that succeeds closes it, and the first that fails opens it again, for longer.
    """

    def __init__(
        self, *, threshold: int = 3, cooldown: float = 1.0, longest: float = 30.0, trial: int = 1
    ) -> None:
        self._threshold, self._first, self._longest, self._trial = threshold, cooldown, longest, trial
        self._cooldown = cooldown
        self._failures = 0
        self._retry_at: float | None = None
        self._half_open = False
        self.opened = 0

    @property
    def closed(self) -> bool:
        """Whether requests may be sent without restraint."""
        return self._retry_at is None and not self._half_open

    @property
    def half_open(self) -> bool:
        """Whether some requests may be sent, to see."""
        return self._half_open

    @property
    def retry_at(self) -> float | None:
        """When the next probe may be sent, None unless open."""
        return self._retry_at

    def admits(self, load: int) -> bool:
        """Whether one more request may be sent beside ``load`` others."""
        return self.closed or (self._half_open and load < self._trial)

    def probed(self) -> None:
        """A probe of an open server succeeded."""
        if self._retry_at is not None:
            self._retry_at, self._half_open = None, True

    def success(self) -> bool:
        """A request was answered. Returns whether this closed a half-open breaker."""
        was, self._half_open = self._half_open, False
        if self._retry_at is None:
            self._failures, self._cooldown = 0, self._first
        return was

    def reset(self) -> None:
        """The server was proved by other means: as good as new."""
        self._failures, self._cooldown = 0, self._first
        self._retry_at, self._half_open = None, False

    def failure(self, now: float) -> bool:
        """The server failed. Returns whether this opened the breaker."""
        self._failures += 1
        if self._retry_at is not None or (not self._half_open and self._failures < self._threshold):
            return False
        return self.trip(now)

    def trip(self, now: float) -> bool:
        """Open at once, or prolong the cool-down of one that was not closed. Returns whether it let requests
        through until now.
        """
        let_through = self._retry_at is None
        if self._half_open or not let_through:
            self._cooldown = min(self._longest, 2 * self._cooldown)
        self._retry_at, self._half_open = now + self._cooldown, False
        self.opened += let_through
        return let_through


class RecentRate:
    """Events a second over the last ``seconds`` whole seconds."""

    def __init__(self, seconds: int = 10) -> None:
        self._seconds = seconds
        self._buckets: dict[int, float] = {}

    def add(self, now: float, amount: float) -> None:
        """Count ``amount`` at time ``now``."""
        second = int(now)
        if second not in self._buckets:
            self._forget(second)
        self._buckets[second] = self._buckets.get(second, 0.0) + amount

    def value(self, now: float) -> float:
        """Return the mean amount a second over the whole seconds before ``now``."""
        self._forget(int(now))
        current = int(now)
        return sum(amount for second, amount in self._buckets.items() if second != current) / self._seconds

    def _forget(self, now: int) -> None:
        for second in [second for second in self._buckets if second < now - self._seconds]:
            del self._buckets[second]
