"""Reading where a run stands again and again: the same as reading it afresh, without reading it all."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from scenes.small_run import batch, evaluation, events, policy, ready, scored

from bus.messages import Message
from engine.lineage import Version
from engine.records import history
from engine.records import status as standing
from engine.records.status import RunStatus, StatusReader

ROWS = 10_000
LIVES = 10


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
def test_what_is_summed_up_step_by_step_is_what_the_whole_says(
    lives: list[list[Message]], data: st.DataObject
) -> None:
    connection = memory()
    reader, done = StatusReader(connection), 0
    stream = events([message for life in lives for message in life])
    while done < len(stream):
        piece = data.draw(st.integers(1, len(stream)))
        history.apply(connection, stream[done : done + piece])
        done += piece
        state = reader.read(now=5000.0)
        assert state == standing.read(connection, now=5000.0)
        reference(connection, state)
    connection.close()


def test_the_newest_event_is_told_whatever_it_is() -> None:
    connection = memory()
    history.apply(connection, events([policy(0), scored("d1")], at=1000.0))
    assert standing.read(connection).last_event_at == 1001.0
    history.apply(connection, events([scored("d2")], start=3, at=900.0))
    assert standing.read(connection).last_event_at == 1001.0
    connection.close()


def long_run() -> sqlite3.Connection:
    """A run of ROWS rounds and LIVES learners, written without its events."""
    connection = memory()
    connection.execute("BEGIN")
    rounds = [(number, number * LIVES // ROWS) for number in range(ROWS)]
    connection.executemany(
        "INSERT INTO policies VALUES (?, ?, ?, ?, ?, 'uri', 'sha', 1)",
        [(Version(fence, n + 1).pack(), 3 * n + 1, 1.0, fence, n + 1) for n, fence in rounds],
    )
    connection.executemany(
        "INSERT INTO batches VALUES (?, ?, 1.0, ?, ?, ?, ?, 3, 2, 1, 1, 0.5, ?, ?, 1.0, 0)",
        [
            (f"b{n}", 3 * n + 2, n, fence, n + 1, Version(fence, n + 1).pack(), '{"stale": 1}', "x" * 800)
            for n, fence in rounds
        ],
    )
    connection.executemany(
        "INSERT INTO scores VALUES (?, ?, 1.0, 0, ?, 0.5, 0.25, 0.5, 0.0, 'frontier', ?)",
        [(f"d{n}", 3 * n + 3, n, "x" * 500) for n, _ in rounds],
    )
    connection.execute("INSERT INTO position VALUES (1, ?)", (3 * ROWS,))
    connection.execute("INSERT INTO counters VALUES (?, 1.0)", (history.LAST_AT,))
    connection.execute("COMMIT")
    return connection


def steps_of(connection: sqlite3.Connection, work: Callable[[], object]) -> int:
    """Return how many thousand instructions of SQLite's machine ``work`` takes."""
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return 0

    connection.set_progress_handler(tick, 1000)
    work()
    connection.set_progress_handler(None, 0)
    return count


def test_a_long_run_is_not_read_again_every_second() -> None:
    connection = long_run()
    reader = StatusReader(connection)
    first = steps_of(connection, reader.read)
    assert first < 4_000
    assert reader.read().agent_samples_trained == 2 * ROWS
    fence = LIVES - 1
    news = [policy(ROWS + 1, fence), batch(ROWS, ROWS + 1, fence), ready("new"), evaluation(ROWS + 1, fence)]
    history.apply(connection, events(news, start=3 * ROWS + 1, at=2.0))
    again = steps_of(connection, reader.read)
    state = reader.read(now=5.0)
    assert (state.step, state.agent_samples_trained) == (ROWS + 1, 2 * ROWS + 2)
    assert state.samples_dropped == {"stale": ROWS + 1}
    assert state == standing.read(connection, now=5.0)
    # What is left is one count of the rows of an index; the sums themselves take a hundred times more.
    assert again < first / 10
    connection.close()
