"""Programs of a run as Gymnasium environments: each instance runs in the sandbox, as in training.

    import gymnasium
    from engine.gymnasium_env import register

    names = register("exported")            # a directory that `spade envs export` wrote
    with gymnasium.make(names[0]) as env:
        observation, info = env.reset(seed=7)
        observation, reward, terminated, truncated, info = env.step("heads")

Observations and actions are texts. ``info["hint"]`` of a reset is the program's hint; a policy that is to be
compared with training must not see it. Needs the package ``gymnasium``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium
from anyio.from_thread import BlockingPortal, start_blocking_portal

from engine.errors import ConfigError
from engine.records.envs import MANIFEST
from sandbox import Instance, SandboxError, SandboxPool, SandboxSettings


class TextSpace(gymnasium.Space[str]):
    """All texts; Gymnasium's own text space has a fixed set of characters."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, str, seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a digit: any text is an action, most mean nothing to a program."""
        return str(self.np_random.integers(10))

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a text."""
        return isinstance(x, str)


class SandboxedEnv(gymnasium.Env[str, str]):
    """One program as an environment. It has a sandbox of its own, or shares that of ``pool``.

    An episode is truncated after ``max_turns`` steps, as in training. Errors of the program are those of
    :mod:`sandbox.errors`; the next reset starts it again.
    """

    def __init__(
        self, source: str, hint: str | None = None, max_turns: int = 25, pool: BlockingPool | None = None
    ) -> None:
        self.observation_space, self.action_space = TextSpace(), TextSpace()
        self._source, self._hint, self._max_turns = source, hint, max_turns
        self._own = ExitStack()
        self._pool = pool or self._own.enter_context(BlockingPool())
        self._instance: Instance | None = None
        self._turn = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode; without a seed one is drawn."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        self._turn = 0
        if self._instance is None:
            self._instance = self._pool.spawn(self._source, self._max_turns)
        return self._ask(self._instance.reset, drawn), {"hint": self._hint, "seed": drawn}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give an action to the program."""
        if self._instance is None:
            raise gymnasium.error.ResetNeeded("Call reset before step.")
        result = self._ask(self._instance.step, action)
        self._turn += 1
        truncated = result.truncated or (self._turn >= self._max_turns and not result.terminated)
        return result.observation, result.reward, result.terminated, truncated, {}

    def _ask(self, method: Any, argument: Any) -> Any:
        try:
            return self._pool.call(method, argument)
        except SandboxError:
            self._end()
            raise

    def _end(self) -> None:
        if self._instance is not None:
            self._pool.call(self._instance.close)
            self._instance = None

    def close(self) -> None:
        """End the program's process, and the sandbox if it is the environment's own."""
        self._end()
        self._own.close()


class BlockingPool:
    """A sandbox pool with an event loop in a thread, for code that does not await."""

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self._settings = settings or SandboxSettings(zygotes=1)
        self._stack = ExitStack()

    def __enter__(self) -> BlockingPool:
        self._portal: BlockingPortal = self._stack.enter_context(start_blocking_portal())
        self._pool: SandboxPool = self._stack.enter_context(
            self._portal.wrap_async_context_manager(SandboxPool(self._settings))
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


def register(directory: Path | str) -> list[str]:
    """Register each program of an exported directory; return the names (``spade/00003-logic-1a2b-v0``).

    Raises ConfigError when the directory has no manifest.
    """
    root = Path(directory)
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        turns = int(manifest["max_turns"])
        programs = [
            (row["file"], row["hint"], (root / row["file"]).read_text(encoding="utf-8"))
            for row in manifest["environments"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{root} has no readable {MANIFEST} with all its programs: {type(error).__name__}: {error}.",
            remedy="Write it with `spade envs export --to DIR`.",
        ) from error
    names = []
    for file, hint, source in programs:
        name = f"spade/{Path(file).stem}-v0"
        gymnasium.register(
            name,
            entry_point=f"{__name__}:{SandboxedEnv.__name__}",
            kwargs={"source": source, "hint": hint, "max_turns": turns},
            disable_env_checker=True,
        )
        names.append(name)
    return names
