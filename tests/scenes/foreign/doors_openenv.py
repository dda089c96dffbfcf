"""An environment that an OpenEnv server serves."""

from __future__ import annotations

import random
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Door(Action):
    number: int


class Seen(Observation):
    text: str


class Doors(Environment[Door, Seen, State]):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        self.right, self._opened = random.Random(seed).randint(1, 3), State(step_count=0)
        return Seen(text="Three doors.")

    def step(self, action: Door, timeout_s: float | None = None, **_: Any) -> Seen:
        self._opened.step_count += 1
        over = action.number == self.right
        return Seen(text="open" if over else "a wall", reward=float(over), done=over)

    @property
    def state(self) -> State:
        return self._opened
