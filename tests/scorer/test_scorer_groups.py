"""A real scorer with tickets of several designs: whole runs, and tickets that nobody can answer."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from scenes.memory_bus import MemoryBus
from scenes.scorer_cast import Cast, scorer
from scenes.scorer_world import config
from test_scorer_role import check, complete, memory_peer

from bus.messages import DesignFailed, DesignTicket

GROUPED = config(
    steps=3,
    curriculum={"environments": 4, "rounds_per_window": 1, "delay": 2, "lead": 1},
    designer={"designs_per_ticket": 2, "attempts": 3},
    learner={"designer": {"max_staleness": 64, "normalise": "zscore", "scope": "group"}},
)


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(run="test", role="test", instance="0")


@pytest.mark.parametrize("crashes", [[], [4, 5, 40]])
async def test_groups_are_trained_together(bus: MemoryBus, tmp_path: Path, crashes: list[int]) -> None:
    cast = await complete(GROUPED, bus, tmp_path, crashes, await memory_peer(bus))
    await check(cast, bus)
    tickets = [key for key in cast.work if key.startswith("ticket:")]
    assert len(tickets) == GROUPED.run.steps * 4 // 2
    groups: dict[str, list[float]] = {}
    for sample in cast.samples.values():
        if sample.role == "designer":
            groups.setdefault(sample.credit.group, []).append(sample.credit.advantage)
    assert len(groups) == len(tickets)
    assert all(abs(sum(advantages)) < 1e-6 for advantages in groups.values())
    assert any(max(advantages) > 0 for advantages in groups.values())


async def test_a_group_that_its_queue_gave_up_on_fails_as_a_whole(bus: MemoryBus, tmp_path: Path) -> None:
    recipe = config(
        steps=1,
        curriculum={"environments": 2, "rounds_per_window": 1, "delay": 1, "reissues": 1},
        designer={"designs_per_ticket": 2, "skills": ["Logic"]},
    )

    class Poisoned(Cast):
        async def _designer(self) -> None:
            async with self.bus.consume("designer", limit=4) as deliveries:
                async for delivery in deliveries:
                    assert isinstance(delivery.message, DesignTicket)
                    self.work[delivery.message.key] += 1
                    await delivery.term("it kills every designer")

    cast = Poisoned(recipe, bus.peer("cast", "0"))
    draining = anyio.Event()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cast.run)
            tasks.start_soon(scorer(recipe, bus.peer("scorer", "0"), tmp_path, draining).run)
            await cast.over.wait()
            draining.set()
    failures = [r.message async for r in bus.replay("EVENT", tails=["event.designer.failed"])]
    told = [(f.design, f.issue, f.failure) for f in failures if isinstance(f, DesignFailed)]
    assert sorted(issue for _, issue, _ in told) == [0, 0, 1, 1]
    assert len({design for design, _, _ in told}) == 2
    assert {failure for _, _, failure in told} == {"infra"}
    assert sorted(cast.work.values()) == [1, 1], "the ticket, and once again"
    assert [closed.plays for closed in cast.closed] == [0, 0]
