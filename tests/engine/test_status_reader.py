"""The status of a run whose learner died and resumed: what its surviving batches say."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from scenes.small_run import batch, events, policy, scored

from bus.messages import Message
from engine.lineage import Version
from engine.records import history
from engine.records import status as standing
from engine.records.status import RunStatus


def memory() -> sqlite3.Connection:
    return history.create(Path(":memory:"))


@st.composite
def stories(draw: st.DrawFn) -> list[list[Message]]:
    """Lives of learners: each resumes at some earlier step, and may say its last batch again."""
    lives: list[list[Message]] = []
    step = round_ = 0
    for fence in range(draw(st.integers(1, 4))):
        if lives:
            back = draw(st.integers(0, step))
            step, round_ = step - back, max(0, round_ - back)
        life: list[Message] = [policy(step, fence)]
        if lives and round_ and draw(st.booleans()):
            life.append(batch(round_ - 1, step, fence, age=draw(st.integers(0, 9))))
        for _ in range(draw(st.integers(0, 4))):
            life += [policy(step + 1, fence), batch(round_, step + 1, fence, age=draw(st.integers(0, 9)))]
            step, round_ = step + 1, round_ + 1
        lives.append(life)
    return lives


def reference(connection: sqlite3.Connection, state: RunStatus) -> None:
    """Compare with what the surviving batches say one by one."""
    tree = standing.lineage(connection)
    batches = standing.surviving(connection, tree)
    versions = [Version.unpack(row[0]) for row in connection.execute("SELECT version FROM policies")]
    published = max((version for version in versions if tree.survives(version)), default=None)
    dropped = sum(sum(json.loads(row["dropped"]).values()) for row in batches)
    last = max(batches, key=lambda row: (row["round"], row["step"]), default=None)
    assert state.lineage == tree.forks
    assert state.packed_published == (published.pack() if published else None)
    assert state.agent_samples_trained == sum(row["agent_samples"] for row in batches)
    assert state.designer_samples_trained == sum(row["designer_samples"] for row in batches)
    assert state.max_staleness_seen == max((row["max_staleness"] for row in batches), default=0)
    assert state.samples_dropped == ({"stale": dropped} if dropped else {})
    assert state.round == (last["round"] if last else None)
    assert state.step == max((row["step"] for row in batches), default=published.step if published else 0)
    assert state.mean_staleness == (last["mean_staleness"] if last else None)


@given(stories(), st.data())
def test_the_sums_are_those_of_the_surviving_batches(lives: list[list[Message]], data: st.DataObject) -> None:
    connection = memory()
    done = 0
    stream = events([message for life in lives for message in life])
    while done < len(stream):
        piece = data.draw(st.integers(1, len(stream)))
        history.apply(connection, stream[done : done + piece])
        done += piece
        reference(connection, standing.read(connection, now=5000.0))
    connection.close()


def test_the_newest_event_is_told_whatever_it_is() -> None:
    connection = memory()
    history.apply(connection, events([policy(0), scored("d1")], at=1000.0))
    assert standing.read(connection).last_event_at == 1001.0
    history.apply(connection, events([scored("d2")], start=3, at=900.0))
    assert standing.read(connection).last_event_at == 1001.0
    connection.close()
