"""The age of samples after a crash. Pure.

A learner that dies returns to its checkpoint and forms the batches since then again, from the same samples in
the same order. Two branches of the version tree part where their batches first *differ*; until then the
versions of both count as one, so a sample of the abandoned branch is no older than when that branch was
alive. Only ages use this: version numbers and ``survives`` follow the tree of forks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from bus.messages import BatchTrained
from engine.config import LearnerConfig
from engine.lineage import Lineage, Version

_DIGEST_BYTES = 16
_SHAPING = (
    *("agent", "designer", "optimizer", "lora", "clip_low", "clip_high", "importance_cap", "importance_mode"),
    *("steps_per_batch", "minibatches", "kl", "entropy", "supervised_mix", "supervised_samples"),
    *("supervised_source", "precision", "router_replay", "trl"),
)


class AgesState(msgspec.Struct, frozen=True):
    """The part of a checkpoint that ages need.

    ``shared``: the last step that the path of each older fence has in common with ours. ``settings``: a
    digest of the settings that the steps were taken under.
    """

    shared: dict[int, int] = {}
    settings: bytes = b""


class RepeatedLineage(Lineage, frozen=True):
    """A lineage that knows how far the paths of older fences are ``shared`` with that of the newest one."""

    shared: dict[int, int] = msgspec.field(default_factory=dict)

    def age(self, current: Version, version: Version) -> int:
        """Return the distance in batches between two versions, where equal batches count as one.

        It is at least 0 and at most the distance in the tree of forks. ``current`` is of the newest fence.
        """
        if current.fence != self.forks[-1][0] or version.fence not in self.shared:
            return super().age(current, version)
        meet = min(self.shared[version.fence], current.step, version.step)
        return (current.step - meet) + (version.step - meet)


class SampleAges:
    """Compares each batch of a learner with the batch that abandoned branches had in its place.

    ``own`` is the version at which it starts, ``lineage`` the forks up to it, ``state`` that of its
    checkpoint, ``facts`` the batches that were announced so far. Batches are equal when round, step and the
    set of their samples are. A branch is followed while every batch is equal; it ends for good at the first
    one that differs or is unknown, and at once under other settings than the checkpoint's.
    """

    def __init__(
        self,
        own: Version,
        lineage: Lineage,
        state: AgesState | None = None,
        facts: Iterable[BatchTrained] = (),
        *,
        settings: bytes = b"",
    ) -> None:
        state = state or AgesState()
        alike = state.settings in (b"", settings)
        self._settings, self._step, self._forks = settings, own.step, dict(lineage.forks)
        older = [fence for fence in self._forks if fence < own.fence]
        self._shared = {
            fence: max(self._meet(fence), min(state.shared.get(fence, 0), own.step)) for fence in older
        }
        self._batches: dict[Version, bytes] = {}
        for fact in facts:
            version, digest = Version.unpack(fact.version), _digest(fact.round, fact.trained)
            if fact.trained and alike and version.step > own.step:
                # A fence that announced two batches for one step counts as unknown.
                known = self._batches.setdefault(version, digest)
                self._batches[version] = digest if known == digest else b""

    def trained(self, step: int, round_: int, samples: Iterable[str]) -> None:
        """Note the batch that made ``step``, the next one, of the samples with these ids."""
        digest = _digest(round_, samples)
        for fence, shared in self._shared.items():
            if shared == step - 1 and self._batch(fence, step) == digest:
                self._shared[fence] = step
        self._step = step

    def lineage(self) -> RepeatedLineage:
        """Return the lineage by which the next batch measures ages."""
        return RepeatedLineage(tuple(self._forks.items()), dict(self._shared))

    def state(self) -> AgesState:
        """Return the part that a checkpoint keeps."""
        return AgesState(dict(self._shared), self._settings)

    def _meet(self, fence: int) -> int:
        """Return the step at which the path of ``fence`` left the newest one, by the forks."""
        return min(step for later, step in self._forks.items() if later > fence)

    def _batch(self, fence: int, step: int) -> bytes | None:
        """Return the batch that made ``step`` on the path to ``fence``, of its own or an earlier fence."""
        for owner in sorted(self._forks, reverse=True):
            if owner <= fence and step > self._forks[owner]:
                return self._batches.get(Version(owner, step))
        return None


def settings_digest(learner: LearnerConfig) -> bytes:
    """Return a digest of the settings that a step on the same batch depends on."""
    table = msgspec.structs.asdict(learner)
    frame = msgspec.json.encode([table[name] for name in _SHAPING], order="sorted")
    return hashlib.blake2b(frame, digest_size=_DIGEST_BYTES).digest()


def _digest(round_: int, samples: Iterable[str]) -> bytes:
    frame = msgspec.msgpack.encode((round_, sorted(samples)))
    return hashlib.blake2b(frame, digest_size=_DIGEST_BYTES).digest()
