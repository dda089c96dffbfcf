"""The number of episodes that an agent holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roles.agent.concurrency import EpisodeLimit, LoadSnapshot


def sight(**seen: Any) -> LoadSnapshot:
    return LoadSnapshot(**{"servers": 32, "waiting": 0, "cuts": 0, "missed": 0, "sandbox": 1000, **seen})


def settle(
    places: EpisodeLimit, seen: LoadSnapshot, *, away: int = 0, looks: int = 40, ended: int = 0
) -> int:
    for _ in range(looks):
        places.look(seen, held=places.limit, away=away, ended=ended)
    return places.limit


def test_no_more_is_held_than_keeps_the_servers_full() -> None:
    assert settle(EpisodeLimit(288), sight(), looks=1) == 40
    assert settle(EpisodeLimit(288), sight(servers=288), looks=1) == 288
    assert settle(EpisodeLimit(288), sight(servers=4), looks=1) == 6


def test_without_a_server_one_waits_for_all() -> None:
    places = EpisodeLimit(288)
    assert places.limit == 1
    assert settle(places, sight(servers=0)) == 1
    assert settle(places, sight(), looks=1) == 40


def test_who_is_in_a_step_leaves_a_place_at_the_servers() -> None:
    assert settle(EpisodeLimit(288), sight(), away=20) == 60
    assert settle(EpisodeLimit(288), sight(), away=20, looks=1) == 44, "on average, not at the moment"
    assert settle(EpisodeLimit(288), sight(), away=500) == 72, "at most as many again as the servers take"


def test_the_sandbox_bounds_the_plays() -> None:
    assert settle(EpisodeLimit(288), sight(sandbox=10)) == 10
    assert settle(EpisodeLimit(288), sight(sandbox=0)) == 1


def test_congestion_halves_once_and_room_is_won_back_a_place_a_round_trip() -> None:
    places = EpisodeLimit(64)
    full = sight(servers=288)
    assert settle(places, full, looks=1) == 64
    relieved = full._replace(cuts=1)
    assert places.look(relieved, held=64, away=0, ended=0) == 32
    assert places.look(relieved, held=64, away=0, ended=0) == 32, "the same count is no news"
    assert places.look(relieved._replace(cuts=2), held=64, away=0, ended=3) == 32, (
        "nor what 61 others may see"
    )
    grown = settle(places, relieved._replace(cuts=2), looks=8, ended=32)
    assert 40 <= grown <= 46, "two a round trip"
    assert settle(places, relieved._replace(cuts=2), looks=100, ended=40) == 64
    assert places.cuts == 1


def test_a_missed_deadline_halves_too() -> None:
    places = EpisodeLimit(64)
    settle(places, sight(servers=288), looks=1)
    assert places.look(sight(servers=288, missed=3), held=64, away=0, ended=0) == 32


def test_an_outage_is_no_congestion() -> None:
    places = EpisodeLimit(64)
    assert settle(places, sight(servers=64), looks=1) == 64
    assert places.look(sight(servers=0, missed=20, cuts=3), held=64, away=0, ended=0) == 1
    assert places.look(sight(servers=64, missed=20, cuts=3), held=1, away=0, ended=0) == 64


def test_who_waits_for_a_server_to_come_back_crowds_nobody() -> None:
    places = EpisodeLimit(64)
    assert settle(places, sight(servers=64), looks=1) == 64
    assert settle(places, sight(servers=0, waiting=60), looks=20) == 1
    assert settle(places, sight(servers=64), looks=1) == 64
    assert places.cuts == 0


def test_congestion_leaves_eight() -> None:
    places = EpisodeLimit(64)
    for cuts in range(1, 9):
        places.look(sight(servers=288, cuts=cuts), held=64, away=0, ended=64)
    assert places.limit == 8


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    places = EpisodeLimit(64)
    places.look(sight(servers=288, cuts=1), held=64, away=0, ended=0)
    for _ in range(40):
        places.look(sight(servers=288, cuts=1), held=3, away=0, ended=40)
    assert places.limit == 32


def test_a_queue_that_stays_after_a_cut_is_given_time_again() -> None:
    places = EpisodeLimit(64)
    crowded = sight(servers=64, waiting=60)
    for _ in range(9):
        places.look(crowded, held=2, away=0, ended=4)
    assert places.cuts == 1


def test_a_burst_of_slow_steps_is_soon_forgotten() -> None:
    places = EpisodeLimit(288)
    assert settle(places, sight(), away=500) == 72
    assert settle(places, sight(), looks=10) <= 44


def test_a_long_queue_halves_only_when_it_stays() -> None:
    places = EpisodeLimit(64)
    crowded = sight(servers=64, waiting=60)
    settle(places, sight(servers=64), looks=1)
    assert settle(places, crowded, looks=7) == 64
    settle(places, sight(servers=64), looks=1)
    assert settle(places, crowded, looks=7) == 64
    assert settle(places, crowded, looks=1) == 32


@given(
    most=st.integers(1, 300),
    looks=st.lists(
        st.tuples(
            st.builds(
                LoadSnapshot,
                servers=st.integers(0, 500),
                waiting=st.integers(0, 500),
                cuts=st.integers(0, 9),
                missed=st.integers(0, 9),
                sandbox=st.integers(0, 500),
            ),
            st.integers(0, 300),
            st.integers(0, 300),
            st.integers(0, 10_000),
        ),
        max_size=30,
    ),
)
def test_the_limit_keeps_its_bounds(most: int, looks: list[tuple[LoadSnapshot, int, int, int]]) -> None:
    places = EpisodeLimit(most)
    for seen, held, away, ended in looks:
        limit = places.look(seen, held=held, away=away, ended=ended)
        assert limit == places.limit
        assert 1 <= limit <= max(1, min(most, seen.sandbox))
        assert limit <= max(1, 2 * seen.servers + max(2, -(-seen.servers // 4)))


def test_what_the_pool_and_the_sandbox_say() -> None:
    pool = {"servers": 2.0, "serving": 1.0, "limit": 64.0, "limit_cuts": 3.0, "waiting": 5.0}
    sandbox = {"live": 20.0, "waiting": 4.0, "max_live": 100.0}
    assert LoadSnapshot.of(pool, sandbox, waiting=4, missed=2, held=10) == LoadSnapshot(32, 4, 3, 2, 86)
    alone = {**pool, "servers": 1.0, "limit": 32.0}
    assert LoadSnapshot.of(alone, sandbox, waiting=0, missed=0, held=10).servers == 32
    assert LoadSnapshot.of({"servers": 0.0}, sandbox, waiting=0, missed=0, held=30).servers == 0
    small = {"live": 0.0, "waiting": 0.0, "max_live": 8.0}
    assert LoadSnapshot.of(pool, small, waiting=0, missed=0, held=30).sandbox == 8


def test_impossible_bounds() -> None:
    with pytest.raises(ValueError, match="impossible limits"):
        EpisodeLimit(0)
