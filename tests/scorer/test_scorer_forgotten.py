"""Tokens of plays that the bus forgot before their group was graded: the run goes on without them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from scenes.memory_bus import MemoryBus
from scorer_cast import Cast
from scorer_world import config
from structlog.testing import capture_logs
from test_scorer_role import complete, memory_peer

from bus.errors import NotFound
from bus.messages import EpisodeFinished, Message, RoundClosed, SampleReady
from engine.config import Config
from engine.lineage import Lineage, Version
from engine.training.buffer import Buffer, Selection

Scope = Literal["group", "skill", "global"]
CRASHES = [20, 36, 37, 52]


def recipe(scope: Scope) -> Config:
    agent = {"scope": scope, "max_staleness": 64}
    return config(steps=3, curriculum={"lead": 1}, learner={"agent": agent})


class Forgetful(MemoryBus):
    """Followers see each outcome, but the body of the first play of a group is gone when it is asked for."""

    def peer(self, role: str, instance: str) -> MemoryBus:
        return Forgetful(run=self.run, role=role, instance=instance, broker=self._broker)

    async def get(self, stream: str, sequence: int) -> Message:
        message = await super().get(stream, sequence)
        if isinstance(message, EpisodeFinished) and message.index == 0:
            raise NotFound(f"{stream} has forgotten {sequence}")
        return message


async def play(bus: MemoryBus, scope: Scope, directory: Path, crashes: list[int]) -> Cast:
    return await complete(recipe(scope), bus, directory, crashes, await memory_peer(bus))


async def batches(bus: MemoryBus) -> list[Selection]:
    """What a learner makes of the samples of a run."""
    limits = recipe("group").learner
    buffer = Buffer({"agent": limits.agent, "designer": limits.designer}, vocabulary=256)
    found: list[Selection] = []
    async for record in bus.replay("SAMPLE"):
        match record.message:
            case SampleReady() as sample:
                buffer.admit(record.sequence, sample)
            case RoundClosed() as closed:
                found.append(buffer.close(closed, Version(1, closed.round), Lineage().fork(1, 0)))
    return found


@pytest.mark.parametrize("scope", ["group", "skill", "global"])
@pytest.mark.parametrize("crashes", [[], CRASHES], ids=["one life", "five lives"])
async def test_a_run_goes_on_without_what_was_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: Scope, crashes: list[int]
) -> None:
    monkeypatch.setattr("roles.scorer.command_executor._CACHE_BYTES", 0)
    bus = Forgetful(run="test", role="test", instance="0")
    with capture_logs() as logs:
        cast = await play(bus, scope, tmp_path, crashes)
    agents = [sample for sample in cast.samples.values() if sample.role == "agent"]
    gone = {sample.sample for sample in agents if not sample.segments}
    assert 0 < len(gone) == len(agents) / 2, "the first of two plays of each group"
    told = [entry for entry in logs if entry["event"] == "scorer.samples_forgotten"]
    assert {entry["round"] for entry in told} == {0, 1, 2}
    if not crashes:
        assert sum(entry["samples"] for entry in told) == len(gone)
        assert len(told) == 3
    selections = await batches(bus)
    assert [selection.missing for selection in selections] == [0] * 4
    assert dict(pair for selection in selections for pair in selection.dropped) == dict.fromkeys(
        gone, "empty"
    )
    taken = {sample.sample for selection in selections for sample in selection.samples}
    assert taken | gone == set(cast.samples)
    assert not taken & gone


async def test_nothing_else_of_the_run_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, advantages and what closes a round are the same, whatever was forgotten."""
    runs = []
    monkeypatch.setattr("roles.scorer.command_executor._CACHE_BYTES", 0)
    for kind in (MemoryBus, Forgetful):
        directory = tmp_path / kind.__name__
        directory.mkdir()
        cast = await play(kind(run="test", role="test", instance="0"), "global", directory, [])
        samples = {name: (one.advantage, one.reward, one.members) for name, one in cast.samples.items()}
        runs.append((samples, cast.closed))
    assert runs[0] == runs[1]
