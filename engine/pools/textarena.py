"""``textarena:`` all games of TextArena for one player, ``textarena:Mastermind-v0,Sokoban-v0`` some.

Needs the package ``textarena``. Its word games read files, which a program cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import textarena
from textarena.envs.registration import ENV_REGISTRY

from engine.pools import names, paid, program

# In the source of games that ask a model, and of those that read files or word lists when they begin.
_OUTSIDE = ("Jury", "Agent(", "jsonl", "nltk", "EnglishDictionary")


class Game:
    """A game. Its player sees each message of the game once; an action needs no brackets."""

    GAME: ClassVar[str]

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin a game."""
        self.game = textarena.make(f"{self.GAME}-raw")
        self.game.reset(num_players=1, seed=seed)
        return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one move."""
        done, _ = self.game.step(action if "[" in action else f"[{action}]")
        if not done:
            return self._news(), 0.0, False, False, {}
        rewards, info = self.game.close()
        return str(info[0].get("reason")), paid(rewards[0]), True, False, {}

    def _news(self) -> str:
        _, messages = self.game.get_observation()
        return "\n".join(said for sender, said, _ in messages if sender == textarena.core.GAME_ID)


def _module(name: str) -> str:
    return str(ENV_REGISTRY[name].entry_point).partition(":")[0]


@cache
def _games() -> tuple[str, ...]:
    """Return the games that one player can play in the sandbox, as far as this Python reads them."""
    root, found = Path(textarena.__file__).parents[1], dict[str, bool]()
    for module in {_module(name) for name in ENV_REGISTRY}:
        try:
            source = root.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
            compile(source, module, "exec")
        except (OSError, SyntaxError):
            continue
        found[module] = "SinglePlayerState" in source and not any(word in source for word in _OUTSIDE)
    raw = [name for name in ENV_REGISTRY if name.endswith("-raw") and found.get(_module(name))]
    return tuple(name.removesuffix("-raw") for name in raw)


def read(argument: str) -> Iterator[tuple[str, str]]:
    """Yield the games."""
    for name in names(argument, _games(), "textarena, for one player and without files,"):
        yield f"textarena/{name}", program(Game, name, GAME=name)


def preload(argument: str) -> list[str]:
    """Return the modules of the games."""
    return [__name__, *dict.fromkeys(_module(name) for name in names(argument, _games(), "textarena"))]
