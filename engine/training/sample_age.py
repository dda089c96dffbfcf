"""How far the branches of the version tree are repeated: what ages are measured by. Pure.

A learner that dies goes back to its checkpoint and forms the batches since then once more, mostly the very
same ones: their samples are in the stream, in the same order. Two branches part where their batches first
*differ*; until then their versions count as one. So samples of the abandoned branch are as old as they were
when it lived, not older by the way back to the checkpoint and down again. Only ages go by this: version
numbers and ``survives`` stay with the tree of forks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from bus.messages import BatchTrained
from engine.config import LearnerConfig
from engine.lineage import Lineage, Version

_DIGEST_BYTES = 16
_AMBIGUOUS = b""  # equals no digest
_SHAPING = (
    *("agent", "designer", "optimizer", "lora", "clip_low", "clip_high", "importance_cap", "importance_mode"),
    *("steps_per_batch", "minibatches", "kl", "entropy", "supervised_mix", "supervised_samples"),
    *("supervised_source", "precision", "trl"),
)


class BranchesState(msgspec.Struct, frozen=True):
    """What a checkpoint keeps. ``shared``: the last step that each older fence's path has in common with
    ours. ``facts``: digests of the batches beyond our step, by fence and step, while a branch is repeated.
    ``position``: the EVENT sequence up to which BatchTrained was read. ``settings``: what a step was made
    by, a digest.
    """

    shared: dict[int, int] = {}
    facts: dict[int, dict[int, bytes]] = {}
    position: int = 0
    settings: bytes = b""


class Ages(Lineage, frozen=True):
    """A lineage that knows how far older fences' paths are ``shared`` with that of the newest fence."""

    shared: dict[int, int] = msgspec.field(default_factory=dict)

    def age(self, current: Version, version: Version) -> int:
        """Return the distance in batches between two versions where batches that are the same count as one
        (>= 0, at most that of the tree of forks). ``current`` is of the newest fence.
        """
        if current.fence != self.forks[-1][0] or version.fence not in self.shared:
            return super().age(current, version)
        meet = min(self.shared[version.fence], current.step, version.step)
        return (current.step - meet) + (version.step - meet)


class Branches:
    """Compares each batch of a learner with those that abandoned branches had in its place.

    ``own`` is the version at which it starts, ``lineage`` the forks up to it, ``state`` what its checkpoint
    kept, ``facts`` what was published since, which it may also be told by :meth:`heard`. A batch is the same
    when round, step and the set of its samples are. A path is followed as long as every batch is the same;
    from the first one that differs, or that nobody has told of, it stays where it is for good. Under other
    ``settings`` than the checkpoint's (:func:`shaping`) no batch is the same.
    """

    def __init__(
        self,
        own: Version,
        lineage: Lineage,
        state: BranchesState | None = None,
        facts: Iterable[BatchTrained] = (),
        *,
        settings: bytes = b"",
    ) -> None:
        state = state or BranchesState()
        self._settings = settings
        self._alike = state.settings in (b"", settings)
        self._forks = dict(lineage.forks)
        self._step = own.step
        self.position = state.position
        older = [fence for fence in self._forks if fence < own.fence]
        self._shared = {
            fence: max(self._meet(fence), min(state.shared.get(fence, 0), own.step)) for fence in older
        }
        self._facts: dict[int, dict[int, bytes]] = {fence: {} for fence in older}
        for fence, batches in state.facts.items():
            for step, digest in batches.items():
                self._learn(Version(fence, step), digest)
        for fact in facts:
            self.heard(fact)
        self._forget()

    def heard(self, fact: BatchTrained) -> None:
        """Take in what was trained before the start, in any order."""
        if fact.trained:
            self._learn(Version.unpack(fact.version), _digest(fact.round, fact.trained))

    def trained(self, step: int, round_: int, samples: Iterable[str]) -> None:
        """Take in the batch that made ``step``, the next one, of the samples with these ids."""
        digest = _digest(round_, samples)
        for fence, shared in self._shared.items():
            if shared == step - 1 and self._fact(fence, step) == digest:
                self._shared[fence] = step
        self._step = step
        self._forget()

    def ages(self) -> Ages:
        """Return the lineage by which the next batch measures ages."""
        return Ages(tuple(self._forks.items()), dict(self._shared))

    @property
    def repeats(self) -> bool:
        """Whether the next batch may be one that an abandoned branch has had."""
        return any(self._facts.values())

    def state(self) -> BranchesState:
        """Return what a checkpoint keeps."""
        facts = {fence: dict(batches) for fence, batches in self._facts.items() if batches}
        return BranchesState(dict(self._shared), facts, self.position, self._settings)

    def _meet(self, fence: int) -> int:
        """Return where the path of ``fence`` left the newest one, by the forks."""
        return min(step for later, step in self._forks.items() if later > fence)

    def _learn(self, version: Version, digest: bytes) -> None:
        batches = self._facts.get(version.fence)
        if batches is None or not self._alike:
            return
        if version.step <= max(self._step, self._forks[version.fence]):
            return
        before = batches.setdefault(version.step, digest)
        if before != digest:
            batches[version.step] = _AMBIGUOUS

    def _fact(self, fence: int, step: int) -> bytes | None:
        """Return the batch that made ``step`` on the path to ``fence``: of its own, or of who it left."""
        for owner in sorted(self._facts, reverse=True):
            if owner <= fence and step > self._forks[owner]:
                return self._facts[owner].get(step)
        return None

    def _forget(self) -> None:
        """Drop what no later batch is compared with."""
        live = any(shared == self._step for shared in self._shared.values())
        for fence, batches in self._facts.items():
            later = {step: digest for step, digest in batches.items() if live and step > self._step}
            self._facts[fence] = later


def shaping(learner: LearnerConfig) -> bytes:
    """Return a digest of the settings that a step on the same batch depends on."""
    table = msgspec.structs.asdict(learner)
    frame = msgspec.json.encode([table[name] for name in _SHAPING], order="sorted")
    return hashlib.blake2b(frame, digest_size=_DIGEST_BYTES).digest()


def _digest(round_: int, samples: Iterable[str]) -> bytes:
    frame = msgspec.msgpack.encode((round_, sorted(samples)))
    return hashlib.blake2b(frame, digest_size=_DIGEST_BYTES).digest()
