"""The pure parts of the chaos test: what is killed when, what work there is, and who counted what."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field

from bus.messages import EpisodeFinished, EpisodeRequest, EpisodeSample, Segment, Span

# Twelve kills are one deck, so that already a short test meets every kind.
DECK = ("server",) * 4 + ("worker",) * 3 + ("producer",) * 2 + ("scorer", "learner", "learner")
_PAUSE = (0.05, 2.0)
_TOKENS = 400


@dataclass(frozen=True)
class Kill:
    """After ``pause`` seconds a process of ``kind`` dies; ``choice`` in [0, 1) says which of them."""

    pause: float
    kind: str
    choice: float


def schedule(seed: int, kills: int) -> list[Kill]:
    """Return ``kills`` kills; the same seed gives the same ones, a longer schedule goes on from it."""
    source, found = random.Random(seed), []
    while len(found) < kills:
        deck = list(DECK)
        source.shuffle(deck)
        found += [Kill(source.uniform(*_PAUSE), kind, source.random()) for kind in deck]
    return found[:kills]


def value(seed: int, producer: str, number: int) -> int:
    """Return what piece ``number`` of a producer is worth: what must be counted exactly once."""
    digest = hashlib.blake2b(f"{seed}/{producer}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def piece(producer: str, number: int, seed: int) -> EpisodeRequest:
    """Return a piece of work. Whoever makes it makes the same one."""
    return EpisodeRequest(
        episode=f"{producer}-{number}",
        design=producer,
        environment="",
        arm="plain",
        round=0,
        index=number,
        seed=value(seed, producer, number),
        source="x" * 200,
        hint=None,
        max_turns=1,
    )


def answer(work: EpisodeRequest, instance: str) -> EpisodeFinished:
    """Return the result of a piece: the same id, whoever computes it."""
    return EpisodeFinished(
        episode=work.episode,
        design=work.design,
        arm=work.arm,
        round=work.round,
        index=work.index,
        returned=1.0,
        outcome="terminated",
        failure=None,
        reason=instance,
        turns=work.seed,
        transcript=(),
        seconds=0.0,
    )


def sample(result: EpisodeFinished) -> EpisodeSample:
    """Return what the learner is to count for a result."""
    segment = Segment(
        tokens=result.index.to_bytes(4, "little") * _TOKENS,
        logprobs=bytes(4 * _TOKENS),
        spans=(Span(0, 0, _TOKENS),),
    )
    return EpisodeSample(episode=result.episode, round=result.turns, segments=(segment,))


@dataclass
class Ledger:
    """The numbers of each producer that had their effect: all below ``upto``, and those ``above``."""

    upto: dict[str, int] = field(default_factory=dict)
    above: dict[str, set[int]] = field(default_factory=dict)

    def add(self, producer: str, number: int) -> bool:
        """Note an effect; False when it was noted before and must not happen again."""
        upto, above = self.upto.setdefault(producer, 0), self.above.setdefault(producer, set())
        if number < upto or number in above:
            return False
        above.add(number)
        while upto in above:
            above.remove(upto)
            upto += 1
        self.upto[producer] = upto
        return True

    def __len__(self) -> int:
        return sum(self.upto.values()) + sum(map(len, self.above.values()))

    def holes(self) -> dict[str, list[int]]:
        """Return for each producer the numbers that are missing below the highest one noted."""
        return {
            name: [number for number in range(self.upto[name], max(above)) if number not in above]
            for name, above in self.above.items()
            if above
        }

    def dump(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {"upto": self.upto, "above": {name: sorted(above) for name, above in self.above.items()}}

    @classmethod
    def load(cls, found: dict[str, dict[str, object]]) -> Ledger:
        """Return what :meth:`dump` gave."""
        return cls(dict(found["upto"]), {name: set(above) for name, above in found["above"].items()})
