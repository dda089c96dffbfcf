"""The version tree: packing, survival, distance (invariants I2, I6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.lineage import Lineage, Version

versions = st.builds(Version, st.integers(0, 2**20), st.integers(0, 2**31 - 1))


@given(versions)
def test_pack_round_trips_and_orders_by_fence_then_step(version: Version) -> None:
    assert Version.unpack(version.pack()) == version


@given(versions, versions)
def test_packed_order_is_the_order_of_fence_and_step(left: Version, right: Version) -> None:
    assert (left.pack() < right.pack()) == (left < right)


def test_distance_goes_through_the_fork() -> None:
    lineage = Lineage().fork(1, 20)
    assert lineage.age(Version(0, 23), Version(0, 20)) == 3
    assert lineage.age(Version(1, 25), Version(0, 18)) == 7
    assert lineage.age(Version(1, 25), Version(0, 23)) == 5 + 3
    assert lineage.survives(Version(0, 20))
    assert not lineage.survives(Version(0, 21))
    assert lineage.survives(Version(1, 25))


def test_a_second_fork_below_the_first_abandons_both_branches() -> None:
    lineage = Lineage().fork(1, 20).fork(2, 10)
    assert not lineage.survives(Version(0, 15))
    assert not lineage.survives(Version(1, 22))
    assert lineage.age(Version(2, 12), Version(1, 22)) == 2 + 12
    assert lineage.age(Version(2, 12), Version(0, 9)) == 3


def test_a_fence_is_never_reused() -> None:
    with pytest.raises(ValueError, match="not newer"):
        Lineage().fork(1, 5).fork(1, 6)


@given(
    st.lists(st.integers(0, 30), max_size=4),
    st.tuples(st.integers(0, 4), st.integers(0, 30)),
    st.tuples(st.integers(0, 4), st.integers(0, 30)),
)
def test_distance_is_symmetric_and_zero_only_for_the_same_weights(
    forks: list[int], left: tuple[int, int], right: tuple[int, int]
) -> None:
    lineage = Lineage()
    for fence, step in enumerate(forks, start=1):
        lineage = lineage.fork(fence, step)
    fences = len(forks)
    a, b = (Version(min(fence, fences), step) for fence, step in (left, right))
    starts = dict(lineage.forks)
    a, b = (Version(v.fence, max(v.step, starts[v.fence])) for v in (a, b))
    assert lineage.age(a, b) == lineage.age(b, a) >= 0
    assert lineage.age(a, a) == 0
