"""An episode outlives its agent: when one is killed, another plays the same instance, and one fact counts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic

import anyio
import anyio.to_thread
import msgspec
import pytest
from scenes.brokers import shorten_leases
from scenes.small_run import request

import bus
from bus.messages import EpisodeFinished

CHILD = Path(__file__).with_name("agent_child.py")
RUN = "lost-agent"
LEASE, SLACK = 4.0, 3.0
COUNTER = """
class CounterEnv:
    def reset(self, seed):
        self.turn, self.start = 0, seed % 5
        return f"count from {self.start}"
    def step(self, action):
        right = int(action) == self.start + self.turn
        self.turn += 1
        return f"turn {self.turn}", float(right), self.turn == 3 or not right, False, {}
"""


@contextmanager
def child(url: str, token: str, instance: str, directory: Path, hang: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, str(CHILD), url, RUN, instance, str(directory), hang]
    environment = {
        **os.environ,
        "SPADE_BUS_TOKEN": token,
        "PYTHONPATH": os.pathsep.join((str(CHILD.parents[2]), str(CHILD.parents[1]))),
    }
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


@asynccontextmanager
async def run_of(directory: Path) -> AsyncIterator[tuple[bus.ServerHandle, bus.Bus]]:
    """A broker that takes work back after a short lease, and the bus of the one who gives work."""
    async with bus.serve(directory / "bus", run=RUN) as handle:
        await bus.provision(handle.url, run=RUN, token=handle.token)
        async with bus.connect(
            handle.url, run=RUN, role="scorer", instance="s0", token=handle.token
        ) as scorer:
            await shorten_leases(scorer, LEASE)
            yield handle, scorer


async def says(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    with anyio.fail_after(40):
        said = await anyio.to_thread.run_sync(process.stdout.readline, abandon_on_cancel=True)
    assert said.strip() == word


async def finished(client: bus.Bus) -> EpisodeFinished:
    async with client.follow("EVENT", tails=("event.agent.>",)) as facts:
        async for record in facts:
            assert isinstance(record.message, EpisodeFinished)
            return record.message
    raise AssertionError("the stream ended")


async def queue(scorer: bus.Bus, reached: Callable[[dict[str, int]], bool]) -> None:
    name = f"CONSUMER.INFO.{scorer.names.stream('TASK')}.agent"
    with anyio.fail_after(40):
        while not reached(await scorer.connection.api(name)):  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("hang", ["playing", "published"])
async def test_the_same_instance_is_played_by_another_and_counts_once(tmp_path: Path, hang: str) -> None:
    async with run_of(tmp_path) as (handle, scorer):
        with child(handle.url, handle.token, "a0", tmp_path, hang) as first:
            await scorer.publish(request(1, seed=13, source=COUNTER))
            await says(first, hang)
            assert (await scorer.stream_info("TASK")).messages == 1
            first.kill()
            first.wait(10)
            before = (await scorer.stream_info("EVENT")).messages
            assert before == (hang == "published")
            with child(handle.url, handle.token, "a1", tmp_path, "never"), anyio.fail_after(40):
                fact = await finished(scorer)
                while (await scorer.stream_info("TASK")).messages:  # noqa: ASYNC110 - nobody tells
                    await anyio.sleep(0.05)
        assert (fact.episode, fact.returned) == ("e1", 1.0)
        assert [turn.action for turn in fact.transcript] == ["3", "4", "5"]
        facts = [record.message async for record in scorer.replay("EVENT", tails=("event.agent.>",))]
        assert [msgspec.structs.replace(one, seconds=0.0) for one in facts] == [
            msgspec.structs.replace(fact, seconds=0.0)
        ]


@pytest.mark.slow
async def test_an_agent_that_is_there_plays_it_all_within_the_lease_and_a_few_seconds(tmp_path: Path) -> None:
    held = 8
    async with run_of(tmp_path) as (handle, scorer):
        with child(handle.url, handle.token, "a0", tmp_path, "playing") as first:
            await scorer.publish_all([request(number, seed=13, source=COUNTER) for number in range(held)])
            await queue(scorer, lambda info: info["num_ack_pending"] == held and not info["num_waiting"])
            with child(handle.url, handle.token, "a1", tmp_path, "never"):
                await queue(scorer, lambda info: info["num_waiting"] > 0)
                assert (await scorer.stream_info("EVENT")).messages == 0
                first.kill()
                killed, seen = monotonic(), set()
                with anyio.fail_after(40):
                    async with scorer.follow("EVENT", tails=("event.agent.>",)) as facts:
                        while len(seen) < held:
                            seen.add((await anext(facts)).message.episode)
                assert monotonic() - killed < LEASE + SLACK
