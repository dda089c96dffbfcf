"""The seconds of a round from the latencies of its parts, and the fastest split of devices. Pure.

A simulation of plays, servers and a learner in the tests finds the same times and the same split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Plays(NamedTuple):
    """A round's plays: how many, their tokens on average, and of the longest.

    ``rounds`` are played at a time; ``concurrency`` bounds the plays of all servers, ``places`` those of one.
    """

    number: float
    tokens: float
    longest: float
    rounds: int
    concurrency: float
    places: float


class Latencies(NamedTuple):
    """Seconds of a decoding step without plays, and what each play adds; of a round's training on one device.

    ``publish`` keeps the learner from training, ``load`` is that of all servers together.
    """

    step: float
    play: float
    train: float
    publish: float
    load: float


class Round(NamedTuple):
    """Seconds of a round's parts; the longest of the first three bounds it.

    ``generation`` is that of its tokens on busy servers. ``longest`` is what a round takes from the start of
    its longest play to the load of its version, divided by the rounds that are played at a time.
    """

    generation: float
    longest: float
    learner: float
    training: float

    @property
    def seconds(self) -> float:
        """Seconds from one round to the next."""
        return max(self[:3])

    def __str__(self) -> str:
        learner = "training" if 2 * self.training >= self.learner else "publishing"
        bound = dict(zip(self[:3], ("generation", "its longest plays", learner), strict=True))[self.seconds]
        return (
            f"about {self.seconds:,.0f} s, bound by {bound}: generation {self.generation:,.0f}, longest "
            f"plays {self.longest:,.0f}, training {self.training:,.0f}, publishing "
            f"{self.learner - self.training:,.0f}"
        )


def round_of(plays: Plays, takes: Latencies, *, servers: int, learners: int) -> Round:
    """Return the round of ``servers`` servers and ``learners`` devices that train."""
    most = min(plays.places, min(plays.rounds * plays.number, plays.concurrency) / servers)
    tokens, training = plays.number * plays.tokens / servers, takes.train / learners
    found = Round(tokens * (takes.step / most + takes.play), 0.0, training + takes.publish, training)
    running = most
    for _ in range(50):  # servers that wait have few plays, which are then fast
        idle = 1 - takes.play * tokens / found.seconds
        running = (running + min(most, takes.step * tokens / found.seconds / idle)) / 2
        alone = plays.longest * (takes.step + takes.play * running)
        found = found._replace(longest=(alone + found.learner + takes.load) / plays.rounds)
    return found


def fastest(splits: Iterable[int], of: Callable[[int], Round]) -> tuple[int, Round] | None:
    """Return the number of servers among ``splits`` with the shortest round ``of`` them, None without any."""
    return min(((servers, of(servers)) for servers in splits), key=lambda one: one[1].seconds, default=None)
