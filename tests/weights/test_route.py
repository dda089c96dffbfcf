"""Which files lead to a version: deltas where their base is held and they are shorter."""

from __future__ import annotations

import msgspec
from scenes.fake_vllm import policy

from bus.messages import PolicyPublished, WeightDelta
from engine.weights.update_plan import routes


def chain(sizes: dict[int, int]) -> tuple[WeightDelta, ...]:
    """Return deltas v0 -> v1 -> ... with the given sizes by the number of their result."""
    return tuple(
        WeightDelta(base=f"v{n - 1}", whole=f"v{n}", uri=f"file:///d{n}", sha256=f"d{n}", size=size)
        for n, size in sizes.items()
    )


def published(*, start: str = "", deltas: tuple[WeightDelta, ...] = ()) -> PolicyPublished:
    return msgspec.structs.replace(policy(3), sha256="v3", size=100, start=start, deltas=deltas)


def test_without_deltas_there_is_the_whole() -> None:
    (way,) = routes(published(), "v2")
    assert (way.uri, way.start, way.deltas, way.bytes) == ("file:///weights/3", "v3", (), 100)


def test_who_holds_a_base_takes_the_rest_of_the_chain() -> None:
    way, whole = routes(published(deltas=chain({1: 5, 2: 5, 3: 5})), "v1")
    assert (way.uri, way.start, [one.whole for one in way.deltas]) == ("", "v1", ["v2", "v3"])
    assert (whole.start, whole.deltas) == ("v3", ())


def test_who_holds_nothing_or_something_else_takes_the_whole() -> None:
    policy_ = published(deltas=chain({2: 5, 3: 5}))
    assert routes(policy_, "") == routes(policy_, "v9") == routes(policy_, "")
    assert routes(policy_, "")[0].bytes == 100


def test_deltas_that_are_no_smaller_are_left() -> None:
    (way,) = routes(published(deltas=chain({2: 50, 3: 50})), "v1")
    assert way.deltas == ()


def test_an_older_whole_leads_on_by_all_deltas() -> None:
    policy_ = published(start="v0", deltas=chain({1: 5, 2: 5, 3: 5}))
    (way,) = routes(policy_, "")
    assert (way.start, len(way.deltas), way.bytes) == ("v0", 3, 115)
    short, whole = routes(policy_, "v2")
    assert (short.uri, short.bytes, whole) == ("", 5, way)


def test_what_is_held_already_is_loaded_again() -> None:
    again, whole = routes(published(), "v3")
    assert (again.uri, again.deltas, again.bytes) == ("", (), 0)
    assert whole.uri
