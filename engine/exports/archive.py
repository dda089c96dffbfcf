"""An exported directory of programs, and episodes of them for code that does not await."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from anyio.from_thread import BlockingPortal, start_blocking_portal

from engine.errors import ConfigError
from engine.records.envs import MANIFEST
from sandbox import EnvFailure, Instance, SandboxError, SandboxPool, SandboxSettings


class Exported(NamedTuple):
    """One program; ``name`` is that of its file without the ending."""

    name: str
    source: str
    hint: str | None


class Archive(NamedTuple):
    """The programs that `spade envs export` wrote, and the largest number of turns of their run."""

    max_turns: int
    programs: tuple[Exported, ...]

    @classmethod
    def read(cls, directory: Path | str) -> Archive:
        """Read a directory. Raises ConfigError when it has no manifest, or not all of its programs."""
        root = Path(directory)
        try:
            manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
            programs = tuple(
                Exported(
                    Path(row["file"]).stem, (root / row["file"]).read_text(encoding="utf-8"), row["hint"]
                )
                for row in manifest["environments"]
            )
            return cls(int(manifest["max_turns"]), programs)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{root} has no readable {MANIFEST} with all its programs: {type(error).__name__}: {error}.",
                remedy="Write it with `spade envs export --to DIR`.",
            ) from error


class Played(NamedTuple):
    """The answer of a program to an action; ``error`` is the fault of the program that ended the episode."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    error: str = ""


class Player:
    """Plays one program after another, each in a process of the sandbox.

    As in training, an episode is truncated after ``max_turns`` steps, and a program that fails in a step ends
    it without a reward. A reset starts it again, and raises the errors of :mod:`sandbox.errors`.
    """

    def __init__(self, pool: BlockingPool, max_turns: int) -> None:
        self._pool, self._max_turns = pool, max_turns
        self._instance: Instance | None = None
        self._source = ""
        self.turn = 0

    @property
    def begun(self) -> bool:
        """Return whether an episode was begun and its program lives."""
        return self._instance is not None

    def reset(self, source: str, seed: int) -> str:
        """Begin an episode of a program."""
        if source != self._source:
            self.close()
        if self._instance is None:
            self._instance = self._pool.spawn(source, self._max_turns)
        self._source, self.turn = source, 0
        return str(self._ask(self._instance.reset, seed))

    def step(self, action: str) -> Played:
        """Give an action to the program."""
        assert self._instance is not None, "reset comes first"
        self.turn += 1
        try:
            result = self._ask(self._instance.step, action)
        except EnvFailure as error:
            return Played("", 0.0, True, False, str(error))
        over = self.turn >= self._max_turns and not result.terminated
        return Played(result.observation, result.reward, result.terminated, result.truncated or over)

    def _ask(self, method: Any, argument: Any) -> Any:
        try:
            return self._pool.call(method, argument)
        except SandboxError:
            self.close()
            raise

    def close(self) -> None:
        """End the program's process."""
        instance, self._instance = self._instance, None
        if instance is not None:
            self._pool.call(instance.close)


class BlockingPool:
    """A sandbox pool with an event loop in a thread, for code that does not await."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> BlockingPool:
        self._portal: BlockingPortal = self._stack.enter_context(start_blocking_portal())
        self._pool: SandboxPool = self._stack.enter_context(
            self._portal.wrap_async_context_manager(SandboxPool(SandboxSettings(zygotes=1)))
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def spawn(self, source: str, max_turns: int) -> Instance:
        """Start a program."""
        return self._portal.call(lambda: self._pool.spawn(source, kwargs={"max_turns": max_turns}))

    def call(self, function: Any, *arguments: Any) -> Any:
        """Await ``function(*arguments)`` on the pool's event loop, and return its result."""
        return self._portal.call(function, *arguments)
