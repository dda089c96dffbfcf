"""When an evaluator plays what: a pure state machine over the facts of servers and learner."""

from __future__ import annotations

from collections.abc import Sequence

from bus.messages import BatchTrained, EvaluationFinished, Message, ServerLost, ServerServing
from engine.lineage import Version


class Agenda:
    """Suites are due at step 0, at every multiple of ``every``, and at the last step of the run.

    A due step that was overtaken while something else was played is not made up: the suite is played at
    the version at hand and named after its true step, which then counts for the newest due step. ``every``
    0 leaves step 0 and the last.
    """

    def __init__(self, suites: Sequence[str], every: int) -> None:
        self._every = every
        self._done: dict[str, set[int]] = {suite: set() for suite in suites}
        self._serving: dict[str, tuple[str, Version]] = {}
        self._final: Version | None = None

    def note(self, fact: Message) -> None:
        """Take in one fact; facts of other kinds and of other suites change nothing."""
        if isinstance(fact, ServerServing):
            self._serving[fact.server] = (fact.epoch, Version.unpack(fact.version))
        elif isinstance(fact, ServerLost):
            if self._serving.get(fact.server, ("", None))[0] == fact.epoch:
                del self._serving[fact.server]
        elif isinstance(fact, EvaluationFinished):
            if fact.suite in self._done:
                self._done[fact.suite].add(fact.step)
        elif isinstance(fact, BatchTrained):
            # A run that was over may go on with more steps: the last word counts.
            self._final = Version.unpack(fact.version) if fact.final else None

    def knows(self, fact: EvaluationFinished) -> bool:
        """Whether this suite was already played at this step."""
        return fact.step in self._done.get(fact.suite, ())

    @property
    def serving(self) -> Version | None:
        """The version that every known server has reached, None without a server."""
        return min((version for _, version in self._serving.values()), default=None)

    def due(self) -> tuple[str, int] | None:
        """Return the next suite to play and the step to name it after, None when nothing is due."""
        version = self.serving
        if version is None:
            return None
        last = self._final is not None and version >= self._final
        mark = version.step if last else self._mark(version.step)
        for suite, done in self._done.items():
            if not any(mark <= step <= version.step for step in done):
                return suite, version.step
        return None

    def _mark(self, step: int) -> int:
        return step - step % self._every if self._every else 0
