"""Few questions tell which claimed messages are still stored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest
from bus_examples import example
from bus_worlds import World

from bus.blobstore import MemoryStore, NatsStore
from bus.claims import Claims
from bus.errors import Denied
from bus.holding import Holding
from bus.messages import SampleReady

Worlds = Callable[..., AbstractAsyncContextManager[World]]


class Asked:
    """Counts what is asked of the stores of a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.single: list[tuple[str, int]] = []
        self.states = 0
        for kind in (NatsStore, MemoryStore):
            self._count(monkeypatch, kind)

    def _count(self, monkeypatch: pytest.MonkeyPatch, kind: type[NatsStore] | type[MemoryStore]) -> None:
        holds, state = kind.holds, kind.state

        async def counted(store: object, stream: str, sequence: int) -> bool:
            self.single.append((stream, sequence))
            return await holds(store, stream, sequence)  # type: ignore[arg-type]

        async def counted_state(store: object, stream: str) -> object:
            self.states += 1
            return await state(store, stream)  # type: ignore[arg-type]

        monkeypatch.setattr(kind, "holds", counted)
        monkeypatch.setattr(kind, "state", counted_state)

    def take(self) -> tuple[int, int]:
        found = len(self.single), self.states
        self.single, self.states = [], 0
        return found


def sample(number: int) -> SampleReady:
    return example(SampleReady, sample=f"s{number}", role="agent", group="g" * 9000)


async def remove(w: World, *, below: int | None = None, tail: str | None = None) -> None:
    """Purge SAMPLE without a look at its bodies, as a client that dies then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Claims, "after_purge", _nothing)
        await w.bus.purge("SAMPLE", below=below, tail=tail)


async def _nothing(*_: object, **__: object) -> None:
    return None


async def test_a_sweep_asks_for_streams_not_for_messages(
    plain_world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with plain_world(inline=4096) as w:
        await w.bus.publish_all(map(sample, range(12)))
        asked = Asked(monkeypatch)
        claims = w.aside.claims
        await claims.sweep()
        assert asked.take() == (0, 1), "the stream of those who claim what lies in BODY"
        before = set(await w.blobs("body.claim.>"))
        await remove(w, tail=sample(4).tail)
        await claims.sweep()
        assert set(await w.blobs("body.claim.>")) == before - {
            claim for claim in before if claim.endswith(".5")
        }
        assert asked.take() == (8, 1), "a few by themselves, the others by where the holes are"
        await remove(w, below=4)
        await remove(w, tail=sample(11).tail)  # the last one is no hole
        await claims.sweep()
        left = [claim.rsplit(".", 1)[1] for claim in await w.blobs("body.claim.>")]
        assert sorted(left, key=int) == ["4", "6", "7", "8", "9", "10", "11"]


async def test_names_are_read_together(plain_world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    async with plain_world() as w:
        for number in range(4):
            await w.bus.blobs.put(f"name.{number}", b"x")
        claims, looked = w.aside.claims, list[str]()
        is_named = claims._is_named

        async def counted(blob: str, name: str) -> bool:
            looked.append(name)
            return await is_named(blob, name)

        monkeypatch.setattr(claims, "_is_named", counted)
        await w.write_blob("blob.name.name.3", None)
        await claims.sweep()
        assert looked == ["name.3"]
        assert len(await w.blobs("blob.data.>")) == 3


async def test_what_is_denied_is_asked_once() -> None:
    class Walled:
        asked = 0

        async def state(self, stream: str) -> object:
            self.asked += 1
            raise Denied("publish", stream)

        async def holds(self, stream: str, sequence: int) -> bool:
            self.asked += 1
            raise Denied("publish", stream)

    store, denied = Walled(), dict[str, Denied]()
    for _ in range(3):
        holding = Holding(store, denied)  # type: ignore[arg-type]
        for number in range(5):
            with pytest.raises(Denied):
                await holding.holds("SAMPLE", number)
    assert store.asked == 2
