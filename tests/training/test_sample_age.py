"""Ages after a crash: branches part where their batches first differ (invariant I6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_fakes import START, round_of, sample

from bus.messages import BatchTrained
from engine.config import LearnerConfig, OptimizerConfig, RoleTraining
from engine.lineage import Lineage, Version
from engine.training.buffer import Buffer, BufferState, Selection
from engine.training.sample_age import AgesState, RepeatedLineage, SampleAges, settings_digest


def fact(version: Version, round_: int, ids: Sequence[str]) -> BatchTrained:
    return BatchTrained(
        round=round_,
        step=version.step,
        version=version.pack(),
        trained=tuple(ids),
        dropped=(),
        agent_samples=len(ids),
        designer_samples=0,
        max_staleness=0,
        mean_staleness=0.0,
        metrics={},
        seconds=0.0,
        final=False,
    )


def branch(fence: int, first: int, last: int, *, other: int = -1) -> list[BatchTrained]:
    """The facts of a fence: step s trained sample s, but ``other`` another one."""
    return [
        fact(Version(fence, step), step - 1, [f"{'x' if step == other else ''}{step}"])
        for step in range(first, last + 1)
    ]


def repeat(branches: SampleAges, first: int, last: int, *, other: int = -1) -> None:
    for one in branch(0, first, last, other=other):
        branches.trained(one.step, one.round, one.trained)


def test_what_is_repeated_is_not_abandoned():
    lineage = Lineage().fork(1, 16)
    branches = SampleAges(Version(1, 16), lineage, facts=branch(0, 1, 32))
    assert branches.lineage().age(Version(1, 16), Version(0, 18)) == 2
    assert lineage.age(Version(1, 24), Version(0, 26)) == 18
    repeat(branches, 17, 24)
    assert branches.lineage().age(Version(1, 24), Version(0, 26)) == 2
    assert branches.lineage().age(Version(1, 24), Version(0, 20)) == 4
    assert branches.lineage().age(Version(1, 24), Version(1, 20)) == 4
    repeat(branches, 25, 34)
    assert branches.lineage().age(Version(1, 34), Version(0, 33)) == 1 + 2, "nobody told of batch 33"


def test_under_other_settings_no_batch_is_the_same():
    slow, fast = (
        settings_digest(LearnerConfig(optimizer=OptimizerConfig(learning_rate=rate))) for rate in (1e-6, 1e-5)
    )
    assert slow == settings_digest(LearnerConfig(checkpoints_kept=5))
    kept = SampleAges(START, Lineage(), settings=slow).state()
    for settings, age in ((slow, 2), (fast, 18)):
        lineage = Lineage().fork(1, 16)
        branches = SampleAges(Version(1, 16), lineage, kept, branch(0, 1, 32), settings=settings)
        repeat(branches, 17, 24)
        assert branches.lineage().age(Version(1, 24), Version(0, 26)) == age
        assert branches.state().settings == settings


@pytest.mark.parametrize(
    ("round_", "ids"), [(16, ["17", "18"]), (16, []), (16, ["18"]), (17, ["17"])], ids=str
)
def test_the_same_batch_is_the_same_set_in_the_same_round(round_: int, ids: list[str]):
    branches = SampleAges(Version(1, 16), Lineage().fork(1, 16), facts=branch(0, 1, 32))
    branches.trained(17, round_, ids)
    assert branches.lineage().shared == {0: 16}


def test_the_order_of_a_batch_does_not_matter():
    branches = SampleAges(Version(1, 0), Lineage().fork(1, 0), facts=[fact(Version(0, 1), 0, ["a", "b"])])
    branches.trained(1, 0, ["b", "a"])
    assert branches.lineage().shared == {0: 1}


def test_a_number_with_two_batches_is_that_of_neither():
    facts = [*branch(0, 1, 20), *branch(0, 18, 18, other=18)]
    branches = SampleAges(Version(1, 16), Lineage().fork(1, 16), facts=facts)
    repeat(branches, 17, 19)
    assert branches.lineage().shared == {0: 17}


def test_other_questions_are_answered_by_the_forks():
    ages = SampleAges(Version(1, 16), Lineage().fork(1, 16), facts=branch(0, 1, 32)).lineage()
    assert not ages.survives(Version(0, 17))
    assert ages.forks == ((0, 0), (1, 16))
    assert ages.age(Version(0, 20), Version(0, 18)) == 2
    assert ages.age(Version(0, 20), Version(1, 18)) == 4 + 2


@dataclass
class Model:
    """The whole truth: the batch behind every version. ``told`` are those that were published."""

    lineage: Lineage = field(default_factory=Lineage)
    paths: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: {0: []})  # (fence, batch)
    told: set[tuple[int, int]] = field(default_factory=set)
    facts: list[BatchTrained] = field(default_factory=list)
    checkpoints: list[tuple[Version, bytes]] = field(
        default_factory=lambda: [(START, msgspec.msgpack.encode(AgesState()))]
    )
    version: Version = START
    branches: SampleAges = field(default_factory=lambda: SampleAges(START, Lineage()))

    def train(self, kind: int, tell: bool) -> None:
        step = self.version.step + 1
        self.version = Version(self.version.fence, step)
        self.paths[self.version.fence].append((self.version.fence, kind))
        self.branches.trained(step, step - 1, [f"{step}:{kind}"])
        if tell:
            self.told.add((self.version.fence, step))
            self.facts.append(fact(self.version, step - 1, [f"{step}:{kind}"]))

    def checkpoint(self) -> None:
        self.checkpoints.append((self.version, msgspec.msgpack.encode(self.branches.state())))

    def start(self, back: int, fork: bool) -> None:
        """Go on at the ``back``-th newest checkpoint; newer ones are gone."""
        del self.checkpoints[max(1, len(self.checkpoints) - back) :]
        own, frame = self.checkpoints[-1]
        self.version = own
        if fork:
            fence = self.lineage.forks[-1][0] + 1
            self.version = Version(fence, own.step)
            self.lineage = self.lineage.fork(fence, own.step)
            self.paths[fence] = self.paths[own.fence][: own.step]
        state = msgspec.msgpack.decode(frame, type=AgesState)
        self.branches = SampleAges(self.version, self.lineage, state, self.facts)

    def common(self, fence: int) -> int:
        """How many batches our path shares with that of ``fence``, as far as it is known."""
        ours, theirs = self.paths[self.version.fence], self.paths[fence]
        for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            known = (other[0], index + 1) in self.told
            if one != other and not (known and one[1] == other[1]):
                return index
        return min(len(ours), len(theirs))


steps = st.tuples(st.just("train"), st.sampled_from([0, 0, 0, 0, 1]), st.booleans())
starts = st.tuples(st.just("start"), st.integers(0, 2), st.just(True))
moves = st.one_of(
    steps, steps, steps, steps, steps, st.tuples(st.just("checkpoint"), st.just(0), st.just(True)), starts
)


@given(st.lists(moves, max_size=40), st.booleans())
def test_ages_are_those_of_the_tree_of_batches(script: list[tuple[str, int, bool]], silent: bool):
    """Several crashes, also while a branch is repeated, at checkpoints of any age.

    Batches differ at times, and the last one before a crash may not have been told of.
    """
    model = Model()
    for index, (what, choice, flag) in enumerate(script):
        following = script[index + 1][0] if index + 1 < len(script) else ""
        if what == "train":
            model.train(choice, tell=following != "start" or flag or not silent)
        elif what == "checkpoint":
            model.checkpoint()
            if following == "checkpoint":  # a drain, and a start without a fork
                model.start(0, fork=False)
        else:
            model.start(choice, fork=True)
        ages = model.branches.lineage()
        for fence, path in model.paths.items():
            for step in range(len(path) + 1):
                found = ages.age(model.version, Version(fence, step))
                common = min(model.common(fence), step)
                assert found == model.version.step + step - 2 * common
                assert found <= model.lineage.age(model.version, Version(fence, step))


def closed(
    buffer: Buffer, round_: int, current: Version, lineage: Lineage, made: Sequence[Version]
) -> Selection:
    samples = [sample(f"{round_}-{i}", round_=round_, versions=[one]) for i, one in enumerate(made)]
    *messages, closing = round_of(round_, samples)
    for message in messages:
        buffer.admit(2 * round_ + 1, message)  # type: ignore[arg-type]
    return buffer.close(closing, current, lineage)  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", [32, 24], ids=["one crash", "a crash while it repeats"])
def test_nothing_since_the_checkpoint_is_lost(ends: int):
    """Checkpoint 16, crash after 32, bound 4, lead 1: what was played is trained again, batch by batch."""
    limits = {"agent": RoleTraining(max_staleness=4), "designer": RoleTraining()}
    buffer, facts, kept = Buffer(limits, vocabulary=64), list[BatchTrained](), BufferState()
    made = {round_: [Version(0, max(0, round_ - lag)) for lag in (0, 1, 2)] for round_ in range(34)}
    for round_ in range(32):
        if round_ == 16:
            kept = buffer.state()
        chosen = closed(buffer, round_, Version(0, round_), Lineage(), made[round_])
        facts.append(fact(Version(0, round_ + 1), round_, [one.sample for one in chosen.samples]))
    lineage, ages = Lineage(), list[int]()
    for fence in (1, 2):
        lineage = lineage.fork(fence, 16)
        buffer = Buffer(limits, vocabulary=64, state=kept)
        branches = SampleAges(Version(fence, 16), lineage, facts=facts)
        for round_ in range(16, 34 if fence == 2 else ends):
            step = round_ + 1
            chosen = closed(buffer, round_, Version(fence, round_), branches.lineage(), made[round_])
            assert len(chosen.samples) == 3, f"round {round_}: {chosen.dropped}"
            assert not chosen.dropped
            names = [one.sample for one in chosen.samples]
            branches.trained(step, round_, names)
            facts.append(fact(Version(fence, step), round_, names))
            ages += chosen.ages
    assert max(ages) <= 4


def test_ages_travel_nowhere():
    """The lineage on the bus stays what it was."""
    ages = SampleAges(Version(1, 16), Lineage().fork(1, 16)).lineage()
    assert isinstance(ages, RepeatedLineage)
    assert msgspec.json.encode(Lineage(ages.forks)) == b'{"forks":[[0,0],[1,16]]}'
