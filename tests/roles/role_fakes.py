"""Fakes for the roles' tests: a character tokenizer, a scripted policy, a sandbox in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import structlog
from scenes.memory_bus import MemoryBus

from bus.messages import Span
from engine.config import (
    AgentConfig,
    Config,
    DesignerConfig,
    EvaluatorConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    SuiteConfig,
)
from engine.inference.completion import Completion
from roles.base import Role, RoleContext
from sandbox import EnvError

START, USER, STOP, OTHER_STOP = 1, 2, 3, 4
_OFFSET = 10


class FakeChat:
    """One token a character; a turn is USER text, a reply ends with STOP."""

    stop_token_ids = (STOP, OTHER_STOP)

    def __init__(self, *, rewrites: bool = False) -> None:
        self._rewrites = rewrites

    def encode(self, text: str) -> list[int]:
        return [_OFFSET + ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token - _OFFSET) for token in ids if token >= _OFFSET)

    def first(self, content: str, system: str | None = None, tools: object = ()) -> list[int]:
        return [START, USER, *self.encode(content)]

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        return False

    def bridge(self, observation: str) -> list[int] | None:
        return None if self._rewrites else [USER, *self.encode(observation)]

    def close(self) -> list[int]:
        return [] if self._rewrites else [STOP]

    def render(self, messages: Sequence[str], system: str | None = None, tools: object = ()) -> list[int]:
        """Like ``first`` and bridges, but earlier replies are left out."""
        turns = [(USER, *self.encode(text)) for text in messages[::2]]
        return [START, *(token for turn in turns for token in turn)]


Script = Callable[[str, int], str | Exception]


class FakePool:
    """Answers with ``script(visible text, call number)``; remembers the prompts it was given.

    When it is ``routed`` a token's one expert, in one layer, is its id modulo 8.
    """

    def __init__(self, script: Script, *, version: int = 0) -> None:
        self.script, self.version, self.limit = script, version, 64
        self.calls: list[dict[str, Any]] = []
        self.busy = self.most_busy = 0
        self.gate: anyio.Event | None = None
        self.stop, self.routed = STOP, False
        self._chat = FakeChat()

    def statistics(self) -> dict[str, float]:
        return {"servers": 1, "serving": 1, "limit": self.limit, "limit_cuts": 0, "waiting": 0}

    def waiting(self, keys: Container[str]) -> int:
        return 0

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
        self.busy += 1
        self.most_busy = max(self.busy, self.most_busy)
        try:
            if self.gate is not None:
                await self.gate.wait()
            await anyio.lowlevel.checkpoint()
            return self._with_experts(self._answer(prompt, sampling, key), prompt, experts_from)
        finally:
            self.busy -= 1

    def _with_experts(self, found: Completion, prompt: Sequence[int], first: int | None) -> Completion:
        if not self.routed or first is None:
            return found
        context = [*prompt, *found.tokens][first:-1]
        rows = np.array([[[token % 8]] for token in context], np.uint8)
        return dataclasses.replace(found, experts=rows)

    def _answer(self, prompt: Sequence[int], sampling: SamplingConfig, key: str) -> Completion:
        self.calls.append({"prompt": list(prompt), "sampling": sampling, "key": key})
        answer = self.script(self._chat.decode(prompt), len(self.calls) - 1)
        if isinstance(answer, Exception):
            raise answer
        tokens = [*self._chat.encode(answer), self.stop][: sampling.max_tokens]
        return Completion(
            tokens=tokens,
            logprobs=[-0.25] * len(tokens),
            spans=(Span(self.version, 0, len(tokens)),),
            finish="stop" if tokens[-1:] == [self.stop] else "length",
        )


class FakeResult(msgspec.Struct):
    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class FakeInstance:
    tools = False

    def __init__(self, program: Any, first: str) -> None:
        self._program, self.first, self.closed = program, first, False

    async def step(self, action: str) -> FakeResult:
        await anyio.lowlevel.checkpoint()
        with program_errors():
            return FakeResult(*self._program.step(action))

    async def close(self) -> None:
        self.closed = True


class FakeSandbox:
    """Runs trusted test programs in this process; ``fault`` is raised by the next spawns instead."""

    def __init__(self) -> None:
        self.instances: list[FakeInstance] = []
        self.faults: list[Exception] = []
        self.max_live = 4096

    def statistics(self) -> dict[str, float]:
        live = sum(not instance.closed for instance in self.instances)
        return {"live": live, "waiting": 0, "max_live": self.max_live}

    async def spawn(
        self, source: str, *, seed: int = 0, kwargs: dict[str, Any] | None = None
    ) -> FakeInstance:
        await anyio.lowlevel.checkpoint()
        if self.faults:
            raise self.faults.pop(0)
        with program_errors():
            names: dict[str, Any] = {}
            exec(source, names)
            program = next(value for name, value in names.items() if name.endswith("Env"))()
            first = program.reset(seed=seed)
        self.instances.append(FakeInstance(program, first if isinstance(first, str) else first[0]))
        return self.instances[-1]


@contextlib.contextmanager
def program_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise EnvError(type(error).__name__, str(error)) from error


class RoleStage:
    """A role at work on a bus of this process; subclasses set the members."""

    bus: MemoryBus
    context: RoleContext
    role: Role

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.role.run)
            yield
            self.context.draining.set()

    async def told(self, count: int, tail: str) -> list[Any]:
        """Return the first ``count`` facts below ``tail``, once they are there."""
        found: list[Any] = []
        with anyio.fail_after(60):
            async with self.bus.follow("EVENT", tails=(tail,)) as records:
                while len(found) < count:
                    found.append((await anext(records)).message)
        return found


COUNTER = '''
class CounterEnv:
    """Won by saying the number of the turn, three times."""
    def reset(self, seed):
        self.turn, self.start = 0, seed % 5
        return f"count from {self.start}"
    def step(self, action):
        right = int(action) == self.start + self.turn
        self.turn += 1
        if not right:
            return "wrong", 0.0, True, False, {}
        done = self.turn == 3
        return f"turn {self.turn}", float(done), done, False, {}
    def solution(self):
        return [str(self.start + turn) for turn in range(3)]
'''


def make_config(**tables: Any) -> Config:
    return Config(
        run=tables.pop("run", RunConfig(name="test", drain_seconds=2.0)),
        model=tables.pop("model", ModelConfig(path="", max_model_len=16_384)),
        agent=tables.pop(
            "agent", AgentConfig(concurrency=8, sampling=SamplingConfig(max_tokens=64), context_tokens=16_384)
        ),
        designer=tables.pop("designer", DesignerConfig(attempts=2, sampling=SamplingConfig(max_tokens=4096))),
        evaluator=tables.pop(
            "evaluator",
            EvaluatorConfig(every=10, suites=(SuiteConfig(name="s", source="dir:x", episodes=4),)),
        ),
        **tables,
    )


def make_context(bus: MemoryBus, config: Config, directory: Path, **shared: Any) -> RoleContext:
    return RoleContext(
        config=config,
        bus=bus,
        directory=directory,
        instance="test-0",
        log=structlog.get_logger(),
        shared={"chat": FakeChat(), **shared},
    )
