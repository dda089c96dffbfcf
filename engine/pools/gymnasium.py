"""``gymnasium:FrozenLake-v1,my_package:MyGame-v0``: environments of Gymnasium with texts or numbered actions.

An observation that is no text is drawn (``ansi``) or, where that cannot be, shown as its value. Needs the
package ``gymnasium``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
from gymnasium.spaces import Discrete

from engine.errors import ConfigError
from engine.pools import KEY, names, paid, program, text

_COLOURED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m")


def _make(name: str) -> gymnasium.Env[Any, Any]:
    drawn = "ansi" in (_entry(name).metadata or {}).get("render_modes", ())
    return gymnasium.make(name, render_mode="ansi" if drawn else None, disable_env_checker=True)


def _entry(name: str) -> Any:
    entry = gymnasium.spec(name).entry_point
    return gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry


class Game:
    """An environment. It pays the sum of its rewards when it ends."""

    NAME: ClassVar[str]

    def __init__(self) -> None:
        self.env = _make(self.NAME)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        self.total = 0.0
        seen, _ = self.env.reset(seed=seed)
        space = self.env.action_space
        if not isinstance(space, Discrete):
            return self._shown(seen), {}
        last = space.start + space.n - 1
        return f"{self._shown(seen)}\nAn action is a number from {space.start} to {last}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one action."""
        chosen: Any = action
        if isinstance(self.env.action_space, Discrete):
            chosen = int(action) if re.fullmatch(r"\s*-?\d{1,9}\s*", action) else None
            if not self.env.action_space.contains(chosen):
                return "That is no action.", 0.0, False, False, {}
        seen, reward, terminated, truncated, _ = self.env.step(chosen)
        self.total += float(reward)
        over = terminated or truncated
        return self._shown(seen), paid(self.total) if over else 0.0, over, False, {}

    def _shown(self, seen: Any) -> str:
        drawn = None if isinstance(seen, str) or self.env.render_mode is None else self.env.render()
        return _COLOURED.sub(r"[\1]", text(seen if drawn is None else drawn))


def read(argument: str) -> Iterator[tuple[str, str]]:
    """Yield the environments named. Raises ConfigError."""
    chosen = names(argument, argument.split(","), "gymnasium")
    for name in chosen:
        try:
            env = _make(name)
        except (gymnasium.error.Error, ImportError) as error:
            raise ConfigError(
                f"Gymnasium cannot make {name!r}: {error}.",
                where=KEY,
                remedy="Example: gymnasium:FrozenLake-v1. An environment of a package: my_package:MyGame-v0.",
            ) from error
        if not isinstance(env.action_space, Discrete) and not isinstance(env.action_space.sample(), str):
            raise ConfigError(f"The actions of {name} are neither texts nor numbers.", where=KEY)
        yield f"gymnasium/{name}", program(Game, name, NAME=name)


def preload(argument: str) -> list[str]:
    """Return the modules of the environments."""
    return [__name__, *dict.fromkeys(_entry(name).__module__ for name in argument.split(","))]
