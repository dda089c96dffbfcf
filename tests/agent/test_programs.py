"""The agent's programs, read once from the facts of the run, and what its own facts tell of a play."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from scenes.memory_bus import MemoryBus
from scenes.small_run import ready, request

from bus.messages import Turn
from roles.agent.episode import Ending, Played
from roles.agent.role import ProgramCache
from sandbox import InfraFailure


class CountingBus(MemoryBus):
    """Counts the facts that are looked up."""

    looked = 0

    async def last(self, tail: str):
        self.looked += 1
        return await super().last(tail)


async def test_a_program_is_looked_up_once() -> None:
    bus = CountingBus(run="test", role="agent", instance="a")
    await bus.publish_all([ready("d1", environment="e1", source="one"), ready("d2", environment="e2")])
    programs, found = ProgramCache(bus), list[str]()

    async def ask() -> None:
        found.append(await programs.source("e1"))

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(ask)
    assert (found, bus.looked) == (["one"] * 8, 1)
    assert await programs.source("e2") != "one"


async def test_a_program_that_no_fact_holds_is_a_fault_of_the_infrastructure() -> None:
    """The episode is handed back; it may come later, after an outage of the bus."""
    bus = MemoryBus(run="test", role="agent", instance="a")
    programs = ProgramCache(bus)
    with pytest.raises(InfraFailure, match="no program e1"):
        await programs.source("e1")
    await bus.publish(ready("d1", environment="e1", source="one"))
    assert await programs.source("e1") == "one"


@pytest.mark.parametrize(
    ("arm", "returned", "turns", "leaked"),
    [
        ("hinted", 1.0, 1, True),
        ("hinted", 0.0, 1, False),
        ("hinted", 1.0, 2, False),
        ("plain", 1.0, 1, False),
    ],
)
def test_a_hint_leaks_in_a_play_that_its_one_action_won(
    arm: Any, returned: float, turns: int, leaked: bool
) -> None:
    turn = Turn("Guess a number.", "it is \\boxed{7}", "7", returned)
    played = Played(Ending("terminated", returned=returned), (), (turn,) * turns, 0.5)
    asked = request(1, arm=arm, hint="The number is 7.")
    assert played.finished(asked, None).leaked == leaked
    assert played.finished(asked, None).transcript == (turn,) * turns
    untold = played.finished(asked, None, told=False)
    assert (untold.transcript, untold.turns, untold.leaked) == ((), turns, leaked)
