"""Decides which suite is due at which step: a pure state machine over facts of servers and learner."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from bus.messages import BatchTrained, EvaluationFinished, Message, PolicyPublished, ServerLost, ServerServing
from engine.lineage import Lineage, Version

KEPT = 64
"""Evaluations per suite that are remembered. After a learner goes back further, they are played again."""


class _Done(NamedTuple):
    """A suite was played under the name of ``step`` by the versions ``low`` to ``high``."""

    step: int
    low: Version
    high: Version


class Agenda:
    """Makes suites due at step 0, at every multiple of ``every``, and at the last step of the run.

    A due step that passed while another suite was played is not made up for: the suite is played at the
    served version under its true step, which then counts for the newest due step. With ``every`` 0 only step
    0 and the last are due.

    Only evaluations of surviving weights count: after a learner forked the lineage, steps beyond the fork are
    due again on the new branch.
    """

    def __init__(self, suites: Sequence[str], every: int) -> None:
        self._every = every
        self._done: dict[str, deque[_Done]] = {suite: deque(maxlen=KEPT) for suite in suites}
        self._serving: dict[str, tuple[str, Version]] = {}
        self._final: Version | None = None
        self._lineage = Lineage()

    def note(self, fact: Message) -> None:
        """Take in one fact; facts of other kinds and of other suites change nothing."""
        if isinstance(fact, ServerServing):
            self._serving[fact.server] = (fact.epoch, Version.unpack(fact.version))
        elif isinstance(fact, ServerLost):
            if self._serving.get(fact.server, ("", None))[0] == fact.epoch:
                del self._serving[fact.server]
        elif isinstance(fact, EvaluationFinished):
            self._note_done(fact)
        elif isinstance(fact, PolicyPublished):
            version = Version.unpack(fact.version)
            if version.fence > self._lineage.forks[-1][0]:
                self.settle(self._lineage.fork(version.fence, version.step))
        elif isinstance(fact, BatchTrained):
            # A run that was over may continue with more steps: the newest fact counts.
            self._final = Version.unpack(fact.version) if fact.final else None

    def settle(self, lineage: Lineage) -> None:
        """Take in the forks of the run and forget evaluations of abandoned weights."""
        self._lineage = lineage
        for suite, done in self._done.items():
            self._done[suite] = deque(filter(self._survives, done), maxlen=KEPT)

    def wants(self, fact: EvaluationFinished) -> bool:
        """Return whether ``fact`` is new and comes from surviving weights of one branch.

        Between versions of two branches there may have been abandoned ones.
        """
        done = _done(fact)
        if done.low.fence != done.high.fence or not self._survives(done):
            return False
        return all(fact.step != known.step for known in self._done.get(fact.suite, ()))

    @property
    def serving(self) -> Version | None:
        """The version that every known server has reached, None without a server."""
        return min((version for _, version in self._serving.values()), default=None)

    def due(self) -> tuple[str, int] | None:
        """Return the next suite to play and the step to name it after, None when nothing is due."""
        version = self.serving
        if version is None or not self._lineage.survives(version):
            return None
        final = self._final
        last = final is not None and self._lineage.survives(final) and version >= final
        mark = version.step if last else self._mark(version.step)
        for suite, done in self._done.items():
            if not any(mark <= known.step <= version.step for known in done):
                return suite, version.step
        return None

    def _note_done(self, fact: EvaluationFinished) -> None:
        done = _done(fact)
        if fact.suite in self._done and self._survives(done):
            self._done[fact.suite].append(done)

    def _survives(self, done: _Done) -> bool:
        return self._lineage.survives(done.low) and self._lineage.survives(done.high)

    def _mark(self, step: int) -> int:
        return step - step % self._every if self._every else 0


def _done(fact: EvaluationFinished) -> _Done:
    return _Done(fact.step, Version.unpack(fact.version), Version.unpack(fact.version_high))
