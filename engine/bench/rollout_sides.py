"""Both sides of the rollout benchmark: the agent role on a real broker, and a bare client."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import anyio
import msgspec
import structlog

from bus import Bus
from bus.messages import EpisodeFailed, EpisodeFinished, EpisodeRequest
from engine.config import Config, SamplingConfig
from engine.context import RoleContext
from engine.errors import SpadeError
from engine.inference import vllm_schema
from engine.inference.completion import Completion
from engine.inference.pool import InferencePool
from engine.running import role_host

if TYPE_CHECKING:
    from engine.inference.tokens import ChatTokens

PROGRAM = """
import random

class RelayEnv:
    def __init__(self, max_turns=100):
        self.max_turns = max_turns
    def reset(self, seed=None):
        self.chance, self.turn = random.Random(seed), 0
        return self.say(WORDS)
    def say(self, count):
        return "Numbers: " + " ".join(map(str, self.chance.choices(range(10, 100), k=count)))
    def step(self, action):
        self.turn += 1
        over = self.turn >= self.max_turns
        return self.say(8), float(over), over, False, {}
"""
PHASE_SECONDS = 240.0


def requests(prefix: str, *, episodes: int, turns: int, words: int, seed: int) -> list[EpisodeRequest]:
    """Return the episodes of one phase. No two share a seed, so none finds its prompt in a cache."""
    source = PROGRAM.replace("WORDS", str(words))
    return [
        EpisodeRequest(
            episode=f"{prefix}-{number}",
            design="bench",
            environment="bench",
            arm="plain",
            round=0,
            index=number,
            seed=seed + number,
            source=source,
            hint=None,
            max_turns=turns,
        )
        for number in range(episodes)
    ]


class RequestShape(NamedTuple):
    """One request: the prompt's token ids, and the number of sampled tokens."""

    prompt: list[int]
    tokens: int


def reply_length(tokens: int, spread: float, episode: str, turn: int) -> int:
    """Return a length within ``(1 ± spread) * tokens`` that depends on ``episode`` and ``turn`` only."""
    reach = int(spread * tokens)
    return tokens + Random(f"{episode}/{turn}").randint(-reach, reach)


class FixedLengthPool:
    """An inference pool whose replies have a fixed length and always act.

    Stop tokens are not sent; the last ids of a reply are replaced by ``tail``, a boxed action and the end of
    a turn. ``asked`` keeps the requests of each episode. Lengths vary by up to ``spread`` (a share), by
    episode and turn: equal replies that begin together would end together and leave the server idle.
    """

    def __init__(self, pool: InferencePool, tail: Sequence[int], *, spread: float = 0.0) -> None:
        self._pool, self._tail, self._spread = pool, list(tail), spread
        self.asked: defaultdict[str, list[RequestShape]] = defaultdict(list)

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingConfig,
        key: str,
        stop_token_ids: Sequence[int],
        deadline: float | None = None,
        experts_from: int | None = None,
    ) -> Completion:
        """Sample from the pool; see its ``generate``."""
        length = reply_length(sampling.max_tokens, self._spread, key, len(self.asked[key]))
        sampling = msgspec.structs.replace(sampling, max_tokens=length)
        self.asked[key].append(RequestShape(list(prompt), length))
        reply = await self._pool.generate(
            prompt, sampling=sampling, key=key, stop_token_ids=(), deadline=deadline
        )
        if len(reply.tokens) != sampling.max_tokens:
            raise SpadeError(f"The server sampled {len(reply.tokens)} of {sampling.max_tokens} tokens.")
        tokens = [*reply.tokens[: -len(self._tail)], *self._tail]
        return Completion(tokens=tokens, logprobs=reply.logprobs, spans=reply.spans, finish="stop")

    def statistics(self) -> dict[str, float]:
        """Return the pool's."""
        return self._pool.statistics()

    def waiting(self, keys: Container[str]) -> int:
        """Return the pool's."""
        return self._pool.waiting(keys)


@dataclass(frozen=True)
class Phase:
    """One phase: ``turns`` in ``seconds``, the requests of each episode, and the time each episode ended."""

    turns: int
    seconds: float
    ends: list[float]
    scripts: list[list[RequestShape]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Turns per second of the whole phase."""
        return self.turns / self.seconds

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(asked.tokens for script in self.scripts for asked in script)

    def steady(self, edge: int) -> float:
        """Turns per second without the first and last ``edge`` episodes: while the server was full."""
        ends = sorted(self.ends)
        share = (len(ends) - 2 * edge) / len(ends)
        return share * self.turns / (ends[-edge - 1] - ends[edge - 1])


@asynccontextmanager
async def agent_running(
    config: Config, bus: Bus, directory: Path, *, pool: FixedLengthPool, sandbox: Any
) -> AsyncIterator[Any]:
    """Run the registered agent role around the body and yield it."""
    context = RoleContext(
        config=config,
        bus=bus,
        directory=directory,
        instance=bus.instance,
        log=structlog.get_logger("spade.bench"),
        shared={"pool": pool, "sandbox": sandbox},
    )
    role = role_host.load("agent")(context)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(role.run)
        yield role
        context.draining.set()


async def engine_phase(bus: Bus, pool: FixedLengthPool, work: Sequence[EpisodeRequest]) -> Phase:
    """Queue ``work`` and return when all of it has finished. Raises SpadeError when an episode failed."""
    pool.asked.clear()
    start = (await bus.stream_info("EVENT")).last + 1
    missing = {request.episode for request in work}
    turns, began = 0, time.perf_counter()
    ends: list[float] = []
    with anyio.move_on_after(PHASE_SECONDS):
        async with bus.follow("EVENT", start=start, tails=("event.agent.>",)) as facts:
            await bus.publish_all(work)
            async for record in facts:
                fact = record.message
                if isinstance(fact, EpisodeFailed) or (
                    isinstance(fact, EpisodeFinished) and fact.outcome != "terminated"
                ):
                    raise SpadeError(f"An episode of the benchmark failed: {fact.failure} {fact.reason}.")
                if isinstance(fact, EpisodeFinished):
                    if fact.turns != work[0].max_turns:
                        raise SpadeError(f"An episode had {fact.turns} turns, not {work[0].max_turns}.")
                    turns += fact.turns
                    ends.append(time.perf_counter())
                    missing.discard(fact.episode)
                if not missing:
                    break
    if missing:
        raise SpadeError(f"{len(missing)} of {len(work)} episodes did not end within {PHASE_SECONDS:.0f} s.")
    seconds = time.perf_counter() - began
    return Phase(turns, seconds, ends, [pool.asked[request.episode] for request in work])


class _ClientChoice(msgspec.Struct):
    token_ids: list[int]


class _ClientAnswer(msgspec.Struct):
    choices: list[_ClientChoice]


_answers = msgspec.json.Decoder(_ClientAnswer)


class BareClient:
    """A load generator: posts prompts and reads token ids."""

    def __init__(self, url: str, session: aiohttp.ClientSession, tail: Sequence[int]) -> None:
        self._url, self._session = f"{url}/inference/v1/generate", session
        self._tail = list(tail)
        self._timeout = aiohttp.ClientTimeout(total=PHASE_SECONDS)

    async def phase(self, scripts: list[list[RequestShape]], *, concurrency: int) -> Phase:
        """Repeat the requests of an engine phase, ``concurrency`` episodes at a time.

        Contexts grow by this client's own replies and by the observations of the engine's phase, so lengths
        and reuse of prefixes are the same.
        """
        waiting, ends = deque(scripts), list[float]()
        began = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(min(concurrency, len(scripts))):
                group.start_soon(self._work, waiting, ends)
        return Phase(sum(map(len, scripts)), time.perf_counter() - began, ends, scripts)

    async def _work(self, waiting: deque[list[RequestShape]], ends: list[float]) -> None:
        while waiting:
            script = waiting.popleft()
            context = list(script[0].prompt)
            for turn, (prompt, tokens) in enumerate(script):
                if turn:
                    before = script[turn - 1]
                    context += prompt[len(before.prompt) + before.tokens :]
                sampling = SamplingConfig(max_tokens=tokens)
                body = vllm_schema.generate_body(context, sampling, stop_token_ids=(), salt="bare")
                async with self._session.post(self._url, data=body, timeout=self._timeout) as response:
                    response.raise_for_status()
                    reply = _answers.decode(await response.read()).choices[0].token_ids
                if len(reply) != tokens:
                    raise SpadeError(f"The server sampled {len(reply)} of {tokens} tokens.")
                context += [*reply[: -len(self._tail)], *self._tail]
            ends.append(time.perf_counter())


def tail_of(chat: ChatTokens) -> list[int]:
    """Return the ids of a boxed action and the end of a turn."""
    return [*chat.encode("\\boxed{7}"), *chat.close()]
