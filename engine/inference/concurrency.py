"""Limits the requests to one server: their number, and whether there are any. Pure, no clock."""

from __future__ import annotations


class Aimd:
    """A concurrency limit that grows by about one per round trip and halves on congestion.

    It starts at ``ceiling``: a server sized for its load is used fully from the first request on. A server
    that comes back (:meth:`restart`) starts at ``floor`` and doubles with each round trip up to the limit it
    had before, so that not all waiting requests arrive at once.

    After a cut, further signals are ignored until as many requests have ended as were in flight at the cut:
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
        """Count a request that ended with ``in_flight`` sent, itself included. Only a used limit grows."""
        self._immune, self._excused = max(0, self._immune - 1), max(0, self._excused - 1)
        if success and not self._immune and 2 * in_flight >= self.limit:
            share = 1.0 if self._value < self._borne else self._value
            self._value = min(self._ceiling, self._value + self._increase / share)

    def congested(self, *, in_flight: int) -> bool:
        """Cut the limit, because the server queues, preempts or times out. Returns whether it was cut."""
        if self._immune or self._excused:
            return False
        self._value = self._borne = max(float(self._floor), self._value * self._decrease)
        self._immune = in_flight
        self.cuts += 1
        return True

    def excuse(self, *, in_flight: int) -> None:
        """Ignore signals until ``in_flight`` requests have ended: an update made them queue, not load."""
        self._excused = in_flight

    def restart(self) -> None:
        """Begin at the floor again, because the server is back."""
        self._borne = max(self._borne, self._value)
        self._value, self._immune = float(self._floor), 0


class Breaker:
    """Opens after ``threshold`` failures in a row; times are seconds of any monotonic clock.

    While it is open the server gets no requests; from ``retry_at`` on it may be probed. A probe that succeeds
    puts it on trial: it takes requests, the first success closes it, and the first failure opens it again.
    Each opening without a success in between doubles the cool-down, up to ``longest``.
    """

    def __init__(self, *, threshold: int = 3, cooldown: float = 1.0, longest: float = 30.0) -> None:
        self._threshold, self._first, self._longest = threshold, cooldown, longest
        self._cooldown = cooldown
        self._failures = 0
        self._trial = False
        self.retry_at: float | None = None
        """The time of the next probe, None unless open."""
        self.opened = 0

    @property
    def closed(self) -> bool:
        """True while requests may be sent."""
        return self.retry_at is None

    def probed(self) -> None:
        """Note that a probe of an open server succeeded."""
        if self.retry_at is not None:
            self.retry_at, self._trial = None, True

    def success(self) -> None:
        """Note an answer; a late one of an open server changes nothing."""
        if self.retry_at is None:
            self.reset()

    def reset(self) -> None:
        """Close: the server was proved by other means."""
        self._failures, self._cooldown = 0, self._first
        self.retry_at, self._trial = None, False

    def failure(self, now: float) -> bool:
        """Count a failed request. Returns whether this opened the breaker."""
        self._failures += 1
        if self.retry_at is not None or (not self._trial and self._failures < self._threshold):
            return False
        return self.trip(now)

    def trip(self, now: float) -> bool:
        """Open at once, or prolong the cool-down. Returns whether requests could be sent until now."""
        was_closed = self.retry_at is None
        if self._trial or not was_closed:
            self._cooldown = min(self._longest, 2 * self._cooldown)
        self.retry_at, self._trial = now + self._cooldown, False
        self.opened += was_closed
        return was_closed


class IdleShare:
    """The share of a round in which a server had no request. Pure: times are arguments.

    A round lasts from one version to the next; ``last`` is the share of the last whole one.
    """

    def __init__(self) -> None:
        self.last: float | None = None
        self._begun: float | None = None
        self._since: float | None = 0.0
        self._idle = 0.0

    def busy(self, now: float) -> None:
        """Note that the server has a request."""
        if self._since is not None:
            self._idle, self._since = self._idle + now - self._since, None

    def free(self, now: float) -> None:
        """Note that the server has none."""
        self._since = now if self._since is None else self._since

    def end_round(self, now: float) -> None:
        """Note that the server has a new version."""
        free = self._since is not None
        self.busy(now)
        if self._begun is not None and now > self._begun:
            self.last = self._idle / (now - self._begun)
        self._begun, self._idle = now, 0.0
        if free:
            self.free(now)


class RecentRate:
    """Events per second over the last ``seconds`` whole seconds."""

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
        """Return the mean amount per second over the whole seconds before ``now``."""
        self._forget(int(now))
        current = int(now)
        return sum(amount for second, amount in self._buckets.items() if second != current) / self._seconds

    def _forget(self, now: int) -> None:
        for second in [second for second in self._buckets if second < now - self._seconds]:
            del self._buckets[second]
