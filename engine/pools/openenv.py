"""``openenv:my_env.server.environment:MyEnvironment``: the classes that OpenEnv's servers serve.

They run in the sandbox, which has no network: a server elsewhere cannot be a pool. Needs the package
``openenv``.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any, ClassVar

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation

from engine.errors import ConfigError
from engine.pools import KEY, paid, program, resolve, text


class Served:
    """An environment. An action is JSON, or the value of the only field that it needs."""

    CLASS: ClassVar[str]

    def __init__(self) -> None:
        self.env = resolve(self.CLASS)()
        self.kind: type[Action] = typing.get_type_hints(type(self.env).step)["action"]

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        self.total = 0.0
        schema = self.kind.model_json_schema()
        self.needed = schema.get("required", [])
        told = {name: field for name, field in schema["properties"].items() if name != "metadata"}
        return f"{self._shown(self.env.reset(seed=seed))}\n\nFields of an action: {json.dumps(told)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one action; the sum of the rewards is paid at the end."""
        try:
            said = json.loads(action)
        except ValueError:
            said = action
        if not isinstance(said, dict) and len(self.needed) == 1:
            wants = self.kind.model_fields[self.needed[0]].annotation
            said = {self.needed[0]: action if wants is str else said}
        try:
            chosen = self.kind.model_validate(said)
        except ValueError as error:
            return f"That is no action: {error}", 0.0, False, False, {}
        seen = self.env.step(chosen)
        self.total += float(seen.reward or 0.0)
        return self._shown(seen), paid(self.total) if seen.done else 0.0, bool(seen.done), False, {}

    def _shown(self, seen: Observation) -> str:
        fields = seen.model_dump(mode="json", exclude={"reward", "done", "metadata"}, exclude_none=True)
        return text(next(iter(fields.values())) if len(fields) == 1 else fields)


def read(argument: str) -> Iterator[tuple[str, str]]:
    """Yield a program for each class. Raises ConfigError."""
    for path in argument.split(","):
        kind = resolve(path)
        if not (isinstance(kind, type) and issubclass(kind, Environment)):
            raise ConfigError(f"{path} is no Environment of OpenEnv.", where=KEY)
        yield f"openenv/{path}", program(Served, path.partition(":")[2], CLASS=path)


def preload(argument: str) -> list[str]:
    """Return the modules of the classes."""
    return [__name__, *dict.fromkeys(path.partition(":")[0] for path in argument.split(","))]
