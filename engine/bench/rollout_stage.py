"""Both sides of the rollout benchmark: the real agent role on a real broker, and a bare client."""

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
from sandbox import StepResult

if TYPE_CHECKING:
    from engine.inference.tokens import ChatTokens

PROGRAM = '''
import random

class RelayEnv:
    """Goes on for as many turns as it is told, whatever is said."""
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
'''
PHASE_SECONDS = 240.0


def requests(prefix: str, *, episodes: int, turns: int, words: int, seed: int) -> list[EpisodeRequest]:
    """Return the plays of one phase; no two share a seed, so none finds its prompt in a cache."""
    source = PROGRAM.replace("WORDS", str(words))
    return [
        EpisodeRequest(
            episode=f"{prefix}-{number}",
            design="bench",
            environment="bench",
            skill="bench",
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


class Asked(NamedTuple):
    """One request: the prompt's ids, and how many tokens were sampled."""

    prompt: list[int]
    tokens: int


def reply_length(tokens: int, spread: float, episode: str, turn: int) -> int:
    """Return a length between ``(1 - spread) * tokens`` and ``(1 + spread) * tokens``, the same each time."""
    reach = int(spread * tokens)
    return tokens + Random(f"{episode}/{turn}").randint(-reach, reach)


class Actor:
    """The pool of a policy that says nothing of sense: sampled to the full length, it always acts.

    Stop tokens are not sent, so every reply has the asked length and costs the server the same; the last ids
    of a reply are then replaced by ``tail``, a boxed action and the end of a turn. ``asked`` keeps the
    requests of each episode.

    A reply is up to ``spread`` (a share) longer or shorter than asked for, by episode and turn: the replies
    of a policy differ, and equal ones that begin together end together, so that a server has all or nothing.
    """

    def __init__(self, pool: InferencePool, tail: Sequence[int], *, spread: float = 0.0) -> None:
        self._pool, self._tail, self._spread = pool, list(tail), spread
        self.asked: defaultdict[str, list[Asked]] = defaultdict(list)

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingConfig,
        seed: int | None,
        key: str,
        stop_token_ids: Sequence[int],
        deadline: float | None = None,
    ) -> Completion:
        """Ask the pool; see its ``generate``."""
        length = reply_length(sampling.max_tokens, self._spread, key, len(self.asked[key]))
        sampling = msgspec.structs.replace(sampling, max_tokens=length)
        self.asked[key].append(Asked(list(prompt), length))
        said = await self._pool.generate(
            prompt, sampling=sampling, seed=seed, key=key, stop_token_ids=(), deadline=deadline
        )
        if len(said.tokens) != sampling.max_tokens:
            raise SpadeError(f"the server sampled {len(said.tokens)} of {sampling.max_tokens} tokens")
        tokens = [*said.tokens[: -len(self._tail)], *self._tail]
        return Completion(tokens=tokens, logprobs=said.logprobs, spans=said.spans, finish="stop")

    def statistics(self) -> dict[str, float]:
        """The pool's."""
        return self._pool.statistics()

    def waiting(self, keys: Container[str]) -> int:
        """The pool's."""
        return self._pool.waiting(keys)


class _Inline:
    """An instance of the benchmark's program in this process: one step, no walls."""

    tools = False

    def __init__(self, program: Any, seed: int) -> None:
        self._program = program
        self.first: str = program.reset(seed)

    async def step(self, action: str) -> StepResult:
        return StepResult(*self._program.step(action))

    async def close(self) -> None:
        """Nothing to end."""


class Inline:
    """Stands for the sandbox where it shall not be measured: runs the benchmark's own program, and no other,
    in this process.
    """

    max_live = 1 << 20

    def __init__(self) -> None:
        self._classes: dict[str, Any] = {}

    async def spawn(self, source: str, *, seed: int, kwargs: dict[str, Any]) -> _Inline:
        """Make an instance of the benchmark's program."""
        if source not in self._classes:
            names: dict[str, Any] = {}
            exec(compile(source, "bench", "exec"), names)  # PROGRAM, and nothing else
            self._classes[source] = names["RelayEnv"]
        return _Inline(self._classes[source](**kwargs), seed)

    def statistics(self) -> dict[str, float]:
        """Nothing is ever short."""
        return {"live": 0.0, "waiting": 0.0, "max_live": float(self.max_live)}


@dataclass(frozen=True)
class Phase:
    """One stretch of work: ``turns`` in ``seconds``, the plays' requests, and when each play ended."""

    turns: int
    seconds: float
    ends: list[float]
    scripts: list[list[Asked]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Turns a second in all."""
        return self.turns / self.seconds

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(asked.tokens for script in self.scripts for asked in script)

    def steady(self, edge: int) -> float:
        """Turns a second without the first and the last ``edge`` plays: while the server was full."""
        ends = sorted(self.ends)
        share = (len(ends) - 2 * edge) / len(ends)
        return share * self.turns / (ends[-edge - 1] - ends[edge - 1])


@asynccontextmanager
async def agent_at_work(
    config: Config, bus: Bus, directory: Path, *, pool: Actor, sandbox: Any
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


async def engine_phase(bus: Bus, actor: Actor, work: Sequence[EpisodeRequest]) -> Phase:
    """Queue ``work`` and return when the last of it is a fact. Raises SpadeError when a play went wrong."""
    actor.asked.clear()
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
                    raise SpadeError(f"a play of the benchmark went wrong: {fact.failure} {fact.reason}")
                if isinstance(fact, EpisodeFinished):
                    if fact.turns != work[0].max_turns:
                        raise SpadeError(f"a play had {fact.turns} turns, not {work[0].max_turns}")
                    turns += fact.turns
                    ends.append(time.perf_counter())
                    missing.discard(fact.episode)
                if not missing:
                    break
    if missing:
        raise SpadeError(f"{len(missing)} of {len(work)} plays had no end after {PHASE_SECONDS:.0f} s")
    seconds = time.perf_counter() - began
    return Phase(turns, seconds, ends, [actor.asked[request.episode] for request in work])


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_answers = msgspec.json.Decoder(_Answer)


class Bare:
    """A load generator: posts prompts, reads token ids, and knows nothing else."""

    def __init__(self, url: str, session: aiohttp.ClientSession, tail: Sequence[int]) -> None:
        self._url, self._session = f"{url}/inference/v1/generate", session
        self._tail = list(tail)
        self._timeout = aiohttp.ClientTimeout(total=PHASE_SECONDS)

    async def phase(self, scripts: list[list[Asked]], *, concurrency: int) -> Phase:
        """Play the requests of an engine phase again, ``concurrency`` conversations at a time.

        Contexts grow by this client's own completions and by what the world added in the engine's phase, so
        lengths and reuse of prefixes are the same.
        """
        waiting, ends = deque(scripts), list[float]()
        began = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(min(concurrency, len(scripts))):
                group.start_soon(self._work, waiting, ends)
        return Phase(sum(map(len, scripts)), time.perf_counter() - began, ends, scripts)

    async def _work(self, waiting: deque[list[Asked]], ends: list[float]) -> None:
        while waiting:
            script = waiting.popleft()
            context = list(script[0].prompt)
            for turn, (prompt, tokens) in enumerate(script):
                if turn:
                    before = script[turn - 1]
                    context += prompt[len(before.prompt) + before.tokens :]
                sampling = SamplingConfig(max_tokens=tokens)
                body = vllm_schema.generate_body(context, sampling, seed=None, stop_token_ids=(), salt="bare")
                async with self._session.post(self._url, data=body, timeout=self._timeout) as response:
                    response.raise_for_status()
                    said = _answers.decode(await response.read()).choices[0].token_ids
                if len(said) != tokens:
                    raise SpadeError(f"the server sampled {len(said)} of {tokens} tokens")
                context += [*said[: -len(self._tail)], *self._tail]
            ends.append(time.perf_counter())


def tail_of(chat: ChatTokens) -> list[int]:
    """Return the ids of a boxed action and the end of a turn."""
    return [*chat.encode("\\boxed{7}"), *chat.close()]
