"""The limit and the breaker, as state machines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.inference.concurrency import Aimd, Breaker, RecentRate

EVENTS = st.lists(st.sampled_from(["ok", "fail", "congested"]), max_size=400)


@given(EVENTS, st.integers(1, 300), st.integers(1, 300))
def test_limit_stays_within_its_bounds(events: list[str], first: int, second: int) -> None:
    floor, ceiling = sorted((first, second))
    aimd = Aimd(ceiling, floor=floor)
    for event in events:
        if event == "congested":
            aimd.congested(in_flight=aimd.limit)
        else:
            aimd.ended(in_flight=aimd.limit, success=event == "ok")
        assert floor <= aimd.limit <= ceiling


def test_one_event_seen_by_all_counts_once() -> None:
    aimd = Aimd(100)
    assert aimd.congested(in_flight=100)
    for _ in range(99):
        aimd.ended(in_flight=50, success=False)
        assert not aimd.congested(in_flight=50)
    assert aimd.limit == 50
    aimd.ended(in_flight=50, success=False)
    assert aimd.congested(in_flight=50)
    assert aimd.limit == 25
    assert aimd.cuts == 2


def test_growth_is_one_a_round_trip() -> None:
    aimd = Aimd(100)
    aimd.congested(in_flight=1)
    for _ in range(52):
        aimd.ended(in_flight=aimd.limit, success=True)
    assert aimd.limit == 51


def test_an_unused_limit_does_not_grow() -> None:
    aimd = Aimd(100)
    aimd.congested(in_flight=1)
    for _ in range(1000):
        aimd.ended(in_flight=3, success=True)
    assert aimd.limit == 50


@given(EVENTS)
def test_enough_successes_bring_the_ceiling_back(events: list[str]) -> None:
    aimd = Aimd(16)
    for event in events:
        if event == "congested":
            aimd.congested(in_flight=4)
        else:
            aimd.ended(in_flight=4, success=event == "ok")
    for _ in range(16 * 16 + 16):
        aimd.ended(in_flight=aimd.limit, success=True)
    assert aimd.limit == 16


@pytest.mark.parametrize(("ceiling", "floor"), [(0, 1), (4, 5), (4, 0)])
def test_impossible_limits_are_refused(ceiling: int, floor: int) -> None:
    with pytest.raises(ValueError, match="impossible limits"):
        Aimd(ceiling, floor=floor)


def test_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(threshold=3)
    for _ in range(5):
        assert not breaker.failure(0.0)
        assert not breaker.failure(0.0)
        breaker.success()
    assert not breaker.failure(1.0)
    assert not breaker.failure(1.0)
    assert breaker.failure(1.0)
    assert not breaker.closed
    assert breaker.retry_at == 2.0


def test_failed_probes_back_off_to_the_longest_and_success_resets() -> None:
    breaker = Breaker(threshold=1, cooldown=1.0, longest=5.0)
    assert breaker.failure(0.0)
    delays = []
    for _ in range(5):
        assert not breaker.trip(100.0)
        delays.append(breaker.retry_at - 100.0)
    assert delays == [2.0, 4.0, 5.0, 5.0, 5.0]
    breaker.reset()
    assert breaker.closed
    assert breaker.failure(0.0)
    assert breaker.retry_at == 1.0


def test_after_a_probe_the_next_answer_decides() -> None:
    breaker = Breaker(threshold=3, cooldown=1.0)
    breaker.probed()
    assert breaker.closed, "nothing to recover from"
    assert breaker.trip(0.0)
    breaker.probed()
    assert breaker.closed
    assert breaker.failure(10.0), "one failure is enough now"
    assert breaker.retry_at == 12.0, "and the cool-down has doubled, though a probe succeeded"
    breaker.probed()
    breaker.success()
    assert not breaker.failure(20.0), "as good as new"
    assert breaker.trip(20.0)
    assert breaker.retry_at == 21.0
    assert breaker.opened == 3


def test_a_late_answer_does_not_close_an_open_breaker() -> None:
    breaker = Breaker()
    breaker.trip(0.0)
    breaker.success()
    assert breaker.retry_at == 1.0


def test_a_server_that_comes_back_doubles_only_up_to_what_it_bore() -> None:
    aimd = Aimd(256, floor=8)
    aimd.congested(in_flight=1)
    aimd.ended(in_flight=1, success=True)
    aimd.restart()
    for _ in range(120):
        aimd.ended(in_flight=aimd.limit, success=True)
    assert aimd.limit == 128
    for _ in range(100):
        aimd.ended(in_flight=aimd.limit, success=True)
    assert aimd.limit == 128
    assert aimd.congested(in_flight=128)
    assert aimd.limit == 64


@given(st.lists(st.sampled_from(["success", "failure", "trip", "probed", "reset"]), max_size=50))
def test_breaker_is_in_one_state_and_always_recovers(events: list[str]) -> None:
    breaker = Breaker()
    for now, event in enumerate(events):
        if event in ("failure", "trip"):
            getattr(breaker, event)(float(now))
        else:
            getattr(breaker, event)()
        assert breaker.closed == (breaker.retry_at is None)
        assert breaker.retry_at is None or breaker.retry_at <= now + 30.0
    breaker.probed()
    breaker.success()
    assert breaker.closed


def test_rate_counts_whole_seconds_and_forgets() -> None:
    rate = RecentRate(seconds=10)
    for second in range(10):
        rate.add(second + 0.5, 3.0)
    assert rate.value(10.2) == pytest.approx(3.0)
    assert rate.value(15.2) == pytest.approx(1.5)
    assert rate.value(40.0) == 0.0


def test_what_an_update_made_wait_is_no_congestion() -> None:
    aimd = Aimd(16)
    aimd.excuse(in_flight=2)
    assert not aimd.congested(in_flight=4)
    aimd.ended(in_flight=4, success=True)
    assert not aimd.congested(in_flight=4)
    aimd.ended(in_flight=4, success=False)
    assert aimd.congested(in_flight=4)
    assert (aimd.limit, aimd.cuts) == (8, 1)
