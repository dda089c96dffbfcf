"""The history: each event has its effect exactly once; status follows the surviving lineage."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenes import small_run
from scenes.small_run import batch, evaluation, events, failed, finished, policy, ready, scored, serving

from bus.messages import Message, ServerLost
from engine.lineage import Version
from engine.records import history
from engine.records import status as standing

STORY: list[Message] = [
    *(policy(0), serving(0), ready("d1"), small_run.rejected("d2"), ready("d2"), finished("e1")),
    *(finished("e2", returned=-1.0), finished("e1"), failed("e3"), failed("e4", "quarantined")),
    *(small_run.summary(0), scored("d1"), policy(1), batch(0, 1, age=2), serving(1), evaluation(1)),
]


def test_a_design_that_repeats_a_known_program_is_valid(database: sqlite3.Connection) -> None:
    designs = [ready("d1"), small_run.rejected("d2", rung="duplicate"), small_run.rejected("d3", rung="load")]
    history.apply(database, events(designs))
    state = standing.read(database, now=1020.0)
    assert (state.designs_rejected, state.duplicates_rejected) == (2, 1)
    assert state.valid_share == pytest.approx(2 / 3)
    assert history.valid_shares(database) == {0: pytest.approx(2 / 3)}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = history.create(tmp_path / "run.db")
    yield connection
    connection.close()


def test_a_small_run_is_counted(database: sqlite3.Connection) -> None:
    history.apply(database, events(STORY))
    state = standing.read(database, now=1020.0)
    assert (state.step, state.version_published, state.versions_serving) == (1, 1, (1,))
    assert (state.episodes_finished, state.episodes_failed) == (2, {"infra": 1, "quarantined": 1})
    assert (state.environments_accepted, state.designs_rejected, state.environments_scored) == (2, 1, 1)
    assert (state.agent_samples_trained, state.designer_samples_trained) == (2, 1)
    assert state.max_staleness_seen == 2
    assert state.samples_dropped == {"stale": 1}
    assert state.valid_share == pytest.approx(2 / 3)
    assert state.tokens_sampled == 6
    assert state.regret == 0.25
    assert state.summary is not None
    assert state.summary["plain"] == 0.4
    assert [item.suite for item in state.evaluations] == ["mid"]


@given(st.lists(st.integers(min_value=0, max_value=len(STORY)), max_size=6), st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_however_a_stream_is_cut_and_replayed_the_counts_are_the_same(
    cuts: list[int], data: st.DataObject
) -> None:
    whole = history.create(Path(":memory:"))
    history.apply(whole, events(STORY))
    pieces = history.create(Path(":memory:"))
    stream = events(STORY)
    done = 0
    for cut in [*sorted(cuts), len(STORY)]:
        start = data.draw(st.integers(min_value=0, max_value=done))
        history.apply(pieces, stream[start:cut])
        done = max(done, cut)
    assert standing.read(pieces, now=2000.0) == standing.read(whole, now=2000.0)
    whole.close()
    pieces.close()


def test_a_failed_write_leaves_nothing_behind(database: sqlite3.Connection) -> None:
    history.apply(database, events(STORY[:4]))
    database.execute("DROP TABLE episodes")
    with pytest.raises(sqlite3.Error):
        history.apply(database, events(STORY[4:], start=5))
    assert history.position(database) == 4
    assert database.execute("SELECT COUNT(*) FROM environments").fetchone()[0] == 1


def test_what_a_dead_learner_published_beyond_its_checkpoint_does_not_count(
    database: sqlite3.Connection,
) -> None:
    first_life = [policy(0), policy(1), batch(0, 1), policy(2), batch(1, 2), serving(2)]
    second_life = [policy(1, fence=1), batch(0, 1, fence=1), serving(1, fence=1)]
    history.apply(database, events([*first_life, *second_life]))
    state = standing.read(database, now=2000.0)
    assert state.lineage == ((0, 0), (1, 1))
    assert (state.step, state.version_published, state.version_published_label) == (1, 1, "1@1")
    assert state.agent_samples_trained == 2
    assert state.versions_serving == (1,)
    history.apply(database, events([policy(2, fence=1), batch(1, 2, fence=1)], start=10))
    state = standing.read(database, now=2000.0)
    assert (state.step, state.agent_samples_trained, state.version_published_label) == (2, 4, "2@1")


def test_the_last_round_that_was_ever_trained_counts_abandoned_branches_too(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    assert history.last_trained(tmp_path / "run.db") == -1
    history.apply(database, events([policy(1), batch(0, 1), policy(2), batch(1, 2)]))
    history.apply(database, events([policy(1, fence=1), batch(0, 1, fence=1)], start=5))
    assert history.last_trained(tmp_path / "run.db") == 1


def test_what_a_dead_learner_s_weights_answered_does_not_stand_for_the_surviving_ones(
    database: sqlite3.Connection,
) -> None:
    first_life = [policy(0), evaluation(0), evaluation(10), evaluation(30), evaluation(30, suite="hard")]
    history.apply(database, events(first_life))
    found = standing.read(database).evaluations
    assert [(item.suite, item.step) for item in found] == [("hard", 30), ("mid", 30)]
    history.apply(database, events([policy(16, fence=1)], start=10))
    assert [(item.suite, item.step) for item in standing.read(database).evaluations] == [("mid", 10)]
    again = msgspec.structs.replace(evaluation(30, fence=1), win=0.1)
    astride = msgspec.structs.replace(evaluation(16), version_high=Version(0, 17).pack())
    history.apply(database, events([again, astride, evaluation(30)], start=11))
    (item,) = standing.read(database).evaluations
    assert (item.step, item.version, item.win) == (30, Version(1, 30).pack(), 0.1)
    assert database.execute("SELECT COUNT(*) FROM evaluations").fetchone()[0] == 6, "the record keeps all"


def test_an_answer_of_an_abandoned_branch_does_not_end_the_run(database: sqlite3.Connection) -> None:
    first_life = [policy(0), policy(1), batch(0, 1), policy(2), batch(1, 2), evaluation(2)]
    second_life = [policy(1, 1), policy(2, 1), batch(1, 2, 1, final=True), serving(2, 1)]
    history.apply(database, events([*first_life, *second_life]))
    assert not standing.complete(standing.read(database), ["mid"], steps=1, servers=True)
    history.apply(database, events([evaluation(2, fence=1)], start=20))
    assert standing.complete(standing.read(database), ["mid"], steps=1, servers=True)


def test_a_lost_server_does_not_serve(database: sqlite3.Connection) -> None:
    lost = ServerLost(server="server-0", epoch="e1", reason="killed")
    history.apply(database, events([policy(0), serving(0), serving(0, server="server-1"), lost]))
    assert standing.read(database).versions_serving == (0,)
    history.apply(database, events([serving(0, epoch="e2"), lost], start=5))
    assert standing.read(database).versions_serving == (0, 0)


@pytest.mark.parametrize(
    ("messages", "over"),
    [
        ([policy(0), batch(0, 1), policy(1), serving(1), evaluation(1)], False),
        ([policy(0), policy(1), batch(0, 1, final=True), serving(0), evaluation(1)], False),
        ([policy(0), policy(1), batch(0, 1, final=True), serving(1)], False),
        ([policy(0), policy(1), batch(0, 1, final=True), serving(1), evaluation(0)], False),
        ([policy(0), policy(1), batch(0, 1, final=True), evaluation(1)], False),
        ([policy(0), policy(1), batch(0, 1, final=True), serving(1), evaluation(1)], True),
    ],
)
def test_a_run_is_over_when_all_have_seen_the_final_weights(
    database: sqlite3.Connection, messages: list[Message], over: bool
) -> None:
    history.apply(database, events(messages))
    state = standing.read(database)
    assert standing.complete(state, ["mid"], steps=0, servers=True) is over
    assert not standing.complete(state, ["mid"], steps=1, servers=True), "more steps are asked for"


def test_versions_are_shown_with_their_lineage(database: sqlite3.Connection) -> None:
    history.apply(database, events([policy(0), policy(3, fence=2), serving(3, fence=2)]))
    server = standing.read(database).servers[0]
    assert (server.step, server.version, server.packed) == (3, "3@2", Version(2, 3).pack())
