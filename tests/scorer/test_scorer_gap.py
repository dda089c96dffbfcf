"""Outcomes that the bus has forgotten before the scorer read them: no round waits for them."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from scenes.memory_bus import MemoryBus
from scenes.scorer_cast import Cast, scorer
from scenes.scorer_world import config

from bus import codec
from bus.messages import EpisodeFailed, EpisodeRequest, RoundSummary

RECIPE = config(steps=4, curriculum={"lead": 1}, learner={"train_hinted": True})


class Forgetful(Cast):
    """Every seventh outcome is evicted from the stream before it is read."""

    plays = 0

    async def _agent(self) -> None:
        assert isinstance(self.bus, MemoryBus)
        async with self.bus.consume("agent", limit=8) as deliveries:
            async for delivery in deliveries:
                request = delivery.message
                assert isinstance(request, EpisodeRequest)
                won = float(self._luck("won", request.episode) < 0.5)
                sample, outcome = self.outcome(request, won)
                await self.bus.publish(sample)
                self.plays += 1
                if self.plays % 7 == 0:
                    frame = codec.encode(outcome, run="test", role="agent", instance="0")
                    sequence = self.bus.inject("EVENT", outcome.tail, frame, outcome.key)
                    del self.bus._broker.log("EVENT").messages[sequence]
                else:
                    await self.bus.publish(outcome)
                await delivery.ack()


async def test_no_round_waits_for_what_was_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roles.scorer.role._MEND_SECONDS", 0.2, raising=False)
    bus = MemoryBus(run="test", role="test", instance="0")
    cast, draining = Forgetful(RECIPE, bus.peer("cast", "0")), anyio.Event()
    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cast.run)
            tasks.start_soon(scorer(RECIPE, bus.peer("scorer", "0"), tmp_path, draining).run)
            await cast.over.wait()
            draining.set()
    facts = [record.message async for record in bus.replay("EVENT")]
    lost = [fact for fact in facts if isinstance(fact, EpisodeFailed)]
    assert len({fact.episode for fact in lost}) == len(lost) >= cast.plays // 7 - 2
    assert {fact.failure for fact in lost} == {"infra"}
    assert len([fact for fact in facts if isinstance(fact, RoundSummary)]) == RECIPE.run.steps
