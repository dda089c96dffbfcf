"""Programs of a run as Gymnasium environments: each instance runs in the sandbox, as in training.

    import gymnasium
    from engine.exports.gymnasium_env import register

    names = register("exported")            # a directory that `spade envs export` wrote
    with gymnasium.make(names[0]) as env:
        observation, info = env.reset(seed=7)
        observation, reward, terminated, truncated, info = env.step("heads")

Observations and actions are texts. ``info["hint"]`` of a reset is the program's hint; a policy that is to be
compared with training must not see it. Needs the package ``gymnasium``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium

from engine.exports.archive import Archive, BlockingPool, Player


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
    """One program as an environment. It has a sandbox of its own, or shares that of ``pool``."""

    def __init__(
        self, source: str, hint: str | None = None, max_turns: int = 25, pool: BlockingPool | None = None
    ) -> None:
        self.observation_space, self.action_space = TextSpace(), TextSpace()
        self._source, self._hint = source, hint
        self._own = ExitStack()
        self._player = Player(pool or self._own.enter_context(BlockingPool()), max_turns)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode; without a seed one is drawn."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        return self._player.reset(self._source, drawn), {"hint": self._hint, "seed": drawn}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give an action to the program. Its own failure ends the episode: ``info["error"]`` says it."""
        if not self._player.begun:
            raise gymnasium.error.ResetNeeded("Call reset before step.")
        played = self._player.step(action)
        told = {"error": played.error} if played.error else {}
        return played.observation, played.reward, played.terminated, played.truncated, told

    def close(self) -> None:
        """End the program's process, and the sandbox if it is the environment's own."""
        self._player.close()
        self._own.close()


def register(directory: Path | str) -> list[str]:
    """Register each program of an exported directory; return the names (``spade/00003-logic-1a2b-v0``).

    Raises ConfigError when the directory has no manifest.
    """
    archive = Archive.read(directory)
    names = []
    for program in archive.programs:
        name = f"spade/{program.name}-v0"
        gymnasium.register(
            name,
            entry_point=f"{__name__}:{SandboxedEnv.__name__}",
            kwargs={"source": program.source, "hint": program.hint, "max_turns": archive.max_turns},
            disable_env_checker=True,
        )
        names.append(name)
    return names
