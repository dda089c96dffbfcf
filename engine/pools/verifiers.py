"""``verifiers:gsm8k``: the tasks of a verifiers (0.4) task set, sixteen in a program; the seed picks one.

Its environment plays the user, the policy its only agent. Tasks that a model judges, that use tools or need a
container cannot be a pool. Needs the package ``verifiers``.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, ClassVar

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils import loaders
from verifiers.v1.utils.decorators import invoke
from verifiers.v1.utils.generic import concrete_type

from engine.errors import ConfigError
from engine.pools import KEY, paid, program, resolve

_TASKS, _EACH, _CHARACTERS = 1_024, 16, 60_000


class _Ask:
    """Hands a text to the player, and waits for the reply."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __await__(self) -> Generator[str, str, str]:
        return (yield self._text)


class _Seat:
    """The only agent of an environment: its replies come from outside."""

    def __init__(self, task: vf.Task) -> None:
        self._opening, self._prompt = task.data.system_prompt, task.data.prompt_text
        self.trace = vf.Trace(
            verifiers=vf.VersionInfo(version=""),
            task=vf.TraceTask(type=type(task).__name__, data=task.data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )

    @asynccontextmanager
    async def interaction(self, _task: vf.Task) -> AsyncIterator[_Seat]:
        yield self

    async def run(self, _task: vf.Task) -> vf.Trace:
        await self.turn()
        return self.trace

    async def turn(self, message: str | None = None) -> vf.Segment:
        said = vf.UserMessage(content=self._prompt if message is None else message)
        opening, self._opening = self._opening, None
        told = [*([vf.SystemMessage(content=opening)] if opening else []), said]
        reply = vf.AssistantMessage(content=await _Ask("\n\n".join(one.content for one in told)))
        for one in (*told, reply):
            count = len(self.trace.nodes)
            self.trace.nodes.append(
                vf.MessageNode(parent=count - 1 if count else None, message=one, sampled=one is reply)
            )
        return vf.Segment([reply])


class _Agents:
    def __init__(self, seat: _Seat) -> None:
        self._seat = seat

    def __getattr__(self, name: str) -> _Seat:
        return self._seat


class Tasks:
    """Some tasks of a task set, and the environment that plays them."""

    TASK: ClassVar[str]
    ENVIRONMENT: ClassVar[str]
    TASKS: ClassVar[tuple[str, ...]]

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin the task that the seed picks."""
        kind, played = resolve(self.TASK), resolve(self.ENVIRONMENT)
        data = self.TASKS[seed % len(self.TASKS)]
        self.task = kind(kind.data_type().model_validate_json(data))
        self.seat = _Seat(self.task)
        environment = object.__new__(played)  # its constructor loads all tasks and a harness
        environment.config = _config(played)
        self.playing: Coroutine[Any, Any, None] = environment.run(self.task, _Agents(self.seat))
        return str(self._go(None)), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give a reply to the environment."""
        told = self._go(action)
        if told is not None:
            return told, 0.0, False, False, {}
        for reward in self.task.hooks("reward"):
            scored = _value(invoke(reward, {"task": self.task.data, "trace": self.seat.trace}))
            each = scored if isinstance(scored, Mapping) else {reward.__name__: scored}
            for name, value in each.items():
                self.seat.trace.record_reward(name, value, getattr(reward, "_vf_weight", 1.0))
        return "", paid(self.seat.trace.reward), True, False, {}

    def _go(self, reply: str | None) -> str | None:
        try:
            told = self.playing.send(reply)
        except StopIteration:
            return None
        if not isinstance(told, str):
            raise RuntimeError(f"{self.ENVIRONMENT} waits for something outside of the sandbox")
        return told


def _config(played: type[vf.Env]) -> Any:
    return (concrete_type(played, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig)()


def _value(scoring: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns that waits for nothing."""
    try:
        scoring.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("the reward waits for something outside of the sandbox")


def _classes(name: str) -> tuple[vf.Taskset, type[vf.Env]]:
    try:
        config = loaders.taskset_config_type(name)
        return loaders.load_taskset(config(id=name)), loaders.environment_class(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"verifiers cannot load the task set {name!r}: {error}.", where=KEY) from error


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def read(argument: str) -> Iterator[tuple[str, str]]:
    """Yield the first tasks of the task sets named. Raises ConfigError."""
    for name in argument.split(","):
        taskset, played = _classes(name)
        fields = {"TASK": _path(type(taskset).task_type()), "ENVIRONMENT": _path(played)}
        tasks: list[str] = []
        count = 0
        for task in islice(taskset, _TASKS):
            if not count and (_outside(task) or len(agent_config_fields(_config(played))) != 1):
                raise ConfigError(
                    f"The task set {name!r} needs a container, a tool server, a judge, or several agents.",
                    where=KEY,
                    remedy="The programs of a pool run in the sandbox, with one player.",
                )
            data = task.data.model_dump_json(exclude_defaults=True)
            if tasks and (len(tasks) == _EACH or sum(map(len, tasks)) + len(data) > _CHARACTERS):
                yield f"verifiers/{name}/{count:04d}", program(Tasks, name, **fields, TASKS=tuple(tasks))
                tasks = []
            tasks.append(data)
            count += 1
        if tasks:
            yield f"verifiers/{name}/{count:04d}", program(Tasks, name, **fields, TASKS=tuple(tasks))


def _outside(task: vf.Task) -> bool:
    runtime = [inspect.signature(reward).parameters.get("runtime") for reward in task.hooks("reward")]
    needs = any(one is not None and one.default is inspect.Parameter.empty for one in runtime)
    return bool(needs or task.NEEDS_CONTAINER or task.config.judges or type(task).toolsets(task.config))


def preload(argument: str) -> list[str]:
    """Return the modules of the task sets and their environments."""
    found = [_classes(name) for name in argument.split(",")]
    modules = [kind.__module__ for taskset, played in found for kind in (type(taskset).task_type(), played)]
    return [__name__, *dict.fromkeys(modules)]
