"""Rounds on eight GPUs in simulated time: plays on servers, a learner, versions. Nothing of it runs."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from engine.inference.concurrency import IdleShare
from engine.running.round_time import Latencies, Plays
from engine.training.time_shares import TimeShares


def lengths(plays: Plays) -> list[float]:
    """Return lengths with that mean and longest, in an order that looks random."""
    power, n = plays.longest / plays.tokens - 1, int(plays.number)
    return [plays.longest * ((i * 97 % n + 0.5) / n) ** power for i in range(n)]


@dataclass
class Engine:
    """A server: all plays on it advance alike, and slower with each."""

    idle: IdleShare = field(default_factory=IdleShare)
    clock: float = 0.0  # in tokens of a play that has been here from the start
    stopped_until: float = 0.0
    plays: list[tuple[float, int, int]] = field(default_factory=list)  # clock at its end, number, round
    unused: float = 0.0


@dataclass
class Outcome:
    """When versions came, what gauges say of the last whole round, and what was true."""

    versions: list[float] = field(default_factory=list)
    ends: dict[int, list[float]] = field(default_factory=dict)
    shares: list[dict[str, float]] = field(default_factory=list)
    true_shares: list[dict[str, float]] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    true_idle: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of a round, once the start is over."""
        third = len(self.versions) // 3
        return (self.versions[-1] - self.versions[third]) / (len(self.versions) - 1 - third)


def simulate(plays: Plays, takes: Latencies, *, servers: int, learners: int, rounds: int = 30) -> Outcome:
    """Play, train and publish ``rounds`` rounds on ``servers`` servers and ``learners`` devices."""
    now, out, numbers = 0.0, Outcome(), count()
    engines = [Engine() for _ in range(servers)]
    queue: deque[tuple[int, float]] = deque()
    left = dict.fromkeys(range(rounds), int(plays.number))
    begun, trained, served = 0, 0, 0
    phase, until = "waiting", float("inf")
    clock, true = TimeShares(0.0), dict.fromkeys(("waiting", "training", "publishing"), 0.0)
    loads: deque[tuple[float, int]] = deque()
    most = min(plays.concurrency, servers * plays.places)
    since, load = [0.0] * servers, takes.load / servers

    def speed(engine: Engine) -> float:
        if not engine.plays or now < engine.stopped_until:
            return 0.0
        return 1 / (takes.step + takes.play * len(engine.plays))

    def next_of(engine: Engine) -> float:
        if engine.plays and now < engine.stopped_until:
            return engine.stopped_until
        return now + (engine.plays[0][0] - engine.clock) / speed(engine) if engine.plays else float("inf")

    while len(out.versions) < rounds or loads:
        while begun < rounds and begun <= served + plays.rounds - 1:
            queue.extend((begun, length) for length in lengths(plays))
            begun += 1
        while queue and sum(len(one.plays) for one in engines) < most:
            round_, length = queue.popleft()
            engine = min(engines, key=lambda one: len(one.plays))
            engine.idle.busy(now)
            heapq.heappush(engine.plays, (engine.clock + length, next(numbers), round_))
        if phase == "waiting" and trained < begun and not left[trained]:
            phase, until = "training", now + takes.train / learners
            clock.begin("training", now)
        then = min(until, loads[0][0] if loads else float("inf"), *map(next_of, engines))
        for engine in engines:
            engine.clock += (then - now) * speed(engine)
            engine.unused += 0.0 if engine.plays else then - now
        true[phase] += then - now
        now = then
        for engine in engines:
            while engine.plays and engine.plays[0][0] <= engine.clock + 1e-6 and now >= engine.stopped_until:
                _, _, round_ = heapq.heappop(engine.plays)
                left[round_] -= 1
                out.ends.setdefault(round_, []).append(now)
                if not engine.plays:
                    engine.idle.free(now)
        if now >= until and phase == "training":
            phase, until = "publishing", now + takes.publish
            clock.begin("publishing", now)
        elif now >= until:
            phase, until, trained = "waiting", float("inf"), trained + 1
            out.versions.append(now)
            out.shares.append(clock.end_round(now))
            whole = sum(true.values())
            out.true_shares.append({f"share_{name}": spent / whole for name, spent in true.items()})
            true = dict.fromkeys(true, 0.0)
            begin = max(now, loads[-1][0] if loads else now)
            loads.extend((begin + load * (i + 1), i) for i in range(servers))
            engines[0].stopped_until = max(engines[0].stopped_until, begin + load)
        while loads and now >= loads[0][0]:
            _, at = loads.popleft()
            engine = engines[at]
            engine.idle.end_round(now)
            if engine.idle.last is not None:
                out.idle.append(engine.idle.last)
                out.true_idle.append(engine.unused / (now - since[at]))
            engine.unused, since[at] = 0.0, now
            if at + 1 < servers:
                engines[at + 1].stopped_until = now + load
            else:
                served += 1
    return out
