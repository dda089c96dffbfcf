"""Mutated programs through the validator, mutated frames through the reader and against live instances.

The long form is ``pytest -m fuzz --fuzz-programs 10000 --fuzz-frames 10000``; add ``-s`` for the figures.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec
import pytest
from judged_corpus import BAD, GOOD
from sandbox_hacks import PAID
from sandbox_honest import HONEST
from sandbox_mutate import frame, program
from sandbox_siege import Lag, belongings
from scenes.programs import PEAK

from engine.nano.seeds import SUITES, held_out
from sandbox import (
    RUNGS,
    EnvFailure,
    Instance,
    SandboxPool,
    SandboxSettings,
    Validator,
    ValidatorSettings,
    Verdict,
)
from sandbox.frames import Malformed, RunnerReply, cut, read_reply

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(3600)]

SETTINGS = SandboxSettings(
    zygotes=2,
    memory_mb=128,
    cpu_call_seconds=0.1,
    cpu_load_seconds=0.2,
    cpu_life_seconds=2,
    wall_call_seconds=0.3,
    strikes=0,
    nice=0,
)
LADDER = ValidatorSettings(seeds=3, replays=1, probe_steps=60, coin_seeds=16)
AT_ONCE = 8
# no program may take the engine's thread longer than this at a time, nor its ladder longer than that
LAG, HANG = 0.5, 120.0

# Answers every request with the frame that the request brings along, and never by itself.
PUPPET = """
import base64, json, os
class PuppetEnv:
    def reset(self, seed):
        return "x"
    def step(self, action):
        while True:
            data = base64.b64decode(action)
            rest = data
            while rest:
                rest = rest[os.write(3, rest):]
            if len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
                os._exit(0)  # an unfinished frame: nobody need wait for more
            head = os.read(3, 4)
            if not head:
                os._exit(0)
            body = b""
            while len(body) < int.from_bytes(head, "little"):
                body += os.read(3, 1 << 20)
            action = json.loads(body)["action"]
"""


def sources() -> list[str]:
    """What is mutated: the programs of other tests, and held-out programs of the seed families."""
    return [
        *(source for table in (BAD, GOOD, HONEST, PAID) for source in table.values()),
        *(episode.source for suite in SUITES for episode in held_out(suite, 12, 0)),
    ]


def option(request: pytest.FixtureRequest, name: str) -> int:
    return int(request.config.getoption(name))


def say(title: str, counts: Counter[str], began: float) -> None:
    """Print what ``-s`` shows."""
    print(f"\n{title}: {counts.total()} in {time.monotonic() - began:.1f} s; {dict(counts.most_common())}")


async def at_once(count: int, work: Callable[[int], object]) -> None:
    """Await ``work(0)`` to ``work(count - 1)``, so many at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)  # type: ignore[misc]

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())


async def test_mutated_programs_get_a_verdict(request: pytest.FixtureRequest) -> None:
    count, seed = option(request, "--fuzz-programs"), option(request, "--fuzz-seed")
    seeds, counts, began = sources(), Counter[str](), time.monotonic()
    slowest = (0.0, -1)
    async with SandboxPool(SETTINGS) as pool:
        validator = Validator(pool, LADDER)

        async def judge(number: int) -> None:
            nonlocal slowest
            source = program(Random(f"{seed} program {number}"), seeds)
            start = time.monotonic()
            try:
                async with asyncio.timeout(HANG):
                    verdict = await validator.validate(source, max_turns=8)
            except Exception as error:
                raise AssertionError(f"program {number} of seed {seed}: {error!r}\n{source}") from error
            slowest = max(slowest, (time.monotonic() - start, number))
            check_verdict(verdict)
            counts[verdict.rung] += 1

        before = belongings(pool)
        async with Lag() as lag:
            await at_once(count, judge)
        assert belongings(pool) == before
        assert lag.worst < LAG
        assert (await validator.validate(PEAK, max_turns=4)).ok
        say("programs", counts, began)
        print(
            f"  longest ladder {slowest[0]:.1f} s (program {slowest[1]}), lag {lag.worst * 1e3:.0f} ms of CPU"
        )
    assert counts.total() == count
    assert len(counts) >= 6, "the mutations reach few rungs"


def check_verdict(verdict: Verdict) -> None:
    """What others rely on, whatever the program was."""
    assert verdict.rung in RUNGS
    assert verdict.ok is (verdict.rung == "accepted")
    assert verdict.ok or verdict.reason
    assert len(verdict.reason) <= 600
    low, high = verdict.trivial_interval
    assert 0 <= low <= verdict.trivial_win_rate <= high <= 1
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict


def read(stream: bytes, number: int, random: Random) -> RunnerReply | None:
    """Read ``stream`` as an instance does, in pieces: the one reply, or None when more is wanted.

    Raises Malformed.
    """
    buffer, reply = bytearray(), None
    while stream:
        size = random.randint(1, max(1, len(stream)))
        buffer, stream = buffer + stream[:size], stream[size:]
        if reply is not None:
            raise Malformed("bytes that nobody asked for")
        body = cut(buffer, SETTINGS.max_reply_bytes)
        if body is not None:
            reply = read_reply(body, number, SETTINGS)
            if buffer:
                raise Malformed("bytes that nobody asked for")
    return reply


def test_mutated_frames_are_read_or_refused(request: pytest.FixtureRequest) -> None:
    count, seed = option(request, "--fuzz-frames"), option(request, "--fuzz-seed")
    counts, began = Counter[str](), time.monotonic()
    for number in range(count):
        random = Random(f"{seed} frame {number}")
        wanted = random.randint(1, 300)
        data = frame(random, wanted)
        start = time.thread_time()
        try:
            reply = read(data, wanted, random)
        except Malformed:
            counts["malformed"] += 1
        else:
            counts["unfinished" if reply is None else "reply"] += 1
            if reply is not None:
                check_reply(reply, wanted)
        assert time.thread_time() - start < 0.1, (number, data[:200])
    say("frames", counts, began)
    assert min(counts["malformed"], counts["reply"]) > count // 20


def check_reply(reply: RunnerReply, number: int) -> None:
    assert reply.i == number
    assert abs(reply.r) <= 10
    assert len(reply.o) <= SETTINGS.max_observation_bytes
    # what goes on to others can be written and read again
    assert msgspec.json.decode(msgspec.json.encode(reply), type=RunnerReply) == reply
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=RunnerReply) == reply


async def test_mutated_frames_from_a_hostile_child(request: pytest.FixtureRequest) -> None:
    count, seed = option(request, "--fuzz-frames"), option(request, "--fuzz-seed")
    counts, began = Counter[str](), time.monotonic()
    puppets: dict[asyncio.Task[object] | None, Instance] = {}
    steps: dict[Instance, int] = {}
    async with SandboxPool(SETTINGS) as pool:

        async def send(number: int) -> None:
            task = asyncio.current_task()
            instance = puppets.get(task)
            if instance is None or instance.error is not None:
                if instance is not None:
                    await instance.close()
                instance = puppets[task] = await pool.spawn(PUPPET)
            random = Random(f"{seed} live {number}")
            wanted = steps[instance] = steps.get(instance, 1) + 1
            data = frame(random, wanted)
            try:
                expected = read(data, wanted, Random(0))
            except Malformed:
                expected = None
            try:
                async with asyncio.timeout(HANG):
                    step = await instance.step(base64.b64encode(data).decode())
            except EnvFailure as error:
                counts[type(error).__name__] += 1
                # what the reader takes is only refused when it says itself that the program raised
                assert expected is None or expected.err is not None, (number, data[:300])
            else:
                counts["answered"] += 1
                # a whole answer may come before the bytes that make it one too many
                if expected is not None:
                    assert (step.observation, step.reward) == (expected.o, expected.r)

        before = belongings(pool)
        async with Lag() as lag:
            await at_once(count, send)
        for instance in puppets.values():
            await instance.close()
        assert belongings(pool) == before
        assert lag.worst < LAG
        async with await pool.spawn(PEAK) as instance:
            await instance.step("4")
        say("frames of a hostile child", counts, began)
    assert counts.total() == count
    assert min(counts["answered"], counts["EnvProtocolError"]) > count // 20
