"""Programs of a run as an OpenEnv server; each session plays in a sandbox process of its own.

    SPADE_EXPORT=DIR uvicorn --factory engine.exports.openenv_server:app

``DIR`` was written by `spade envs export`. The action is ``{"text": ...}``, an observation has ``text``,
``reward`` and ``done``. A reset takes ``seed`` and ``program`` (the name of a file without its ending);
without ``program`` the seed picks one. Hints are not served. Needs the package ``openenv``.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import field_validator

from engine.errors import ConfigError
from engine.exports.archive import Archive, BlockingPool, Player

DIRECTORY = "SPADE_EXPORT"
SESSIONS = 64


class TextAction(Action):
    """A text of the policy. A client that reads replies as JSON sends ``3`` for a text of this digit."""

    text: str

    @field_validator("text", mode="before")
    @classmethod
    def _as_said(cls, value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)


class TextObservation(Observation):
    """The program's answer."""

    text: str
    truncated: bool = False


class ProgramState(State):
    """The episode of a session."""

    program: str = ""
    seed: int = 0


class ProgramEnvironment(Environment[TextAction, TextObservation, ProgramState]):
    """One session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, archive: Archive, pool: BlockingPool) -> None:
        super().__init__()
        self._programs = {one.name: one for one in archive.programs}
        self._player = Player(pool, archive.max_turns)
        self._state = ProgramState()

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, program: str = "", **_: Any
    ) -> TextObservation:
        """Begin an episode of ``program``, or of one that the seed picks."""
        drawn = random.randrange(2**31) if seed is None else seed
        name = program or list(self._programs)[drawn % len(self._programs)]
        if name not in self._programs:
            raise ValueError(f"There is no program {name!r}. There are: {', '.join(self._programs)}.")
        self._state = ProgramState(episode_id=episode_id, program=name, seed=drawn)
        return TextObservation(text=self._player.reset(self._programs[name].source, drawn))

    def step(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        """Give an action to the program."""
        if not self._player.begun:
            raise ValueError("Reset the environment before a step.")
        played = self._player.step(action.text)
        self._state.step_count = self._player.turn
        return TextObservation(
            text=played.observation,
            reward=played.reward,
            done=played.terminated or played.truncated,
            truncated=played.truncated,
        )

    @property
    def state(self) -> ProgramState:
        """Return the episode's program, seed and number of steps."""
        return self._state

    def close(self) -> None:
        """End the program's process."""
        self._player.close()


def app() -> FastAPI:
    """Return the server of the directory that the environment variable ``SPADE_EXPORT`` names.

    Raises ConfigError when it has no programs.
    """
    archive = Archive.read(os.environ.get(DIRECTORY, "."))
    if not archive.programs:
        raise ConfigError("The export has no program.", remedy="Write it with `spade envs export --to DIR`.")
    pool = BlockingPool()
    served: FastAPI = create_fastapi_app(
        lambda: ProgramEnvironment(archive, pool), TextAction, TextObservation, max_concurrent_envs=SESSIONS
    )
    inner = served.router.lifespan_context

    @asynccontextmanager
    async def lifespan(application: FastAPI) -> AsyncIterator[Any]:
        with pool:
            async with inner(application) as state:
                yield state

    served.router.lifespan_context = lifespan
    return served
