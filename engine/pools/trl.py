"""``trl:my_package.games:Game``: classes that TRL's trainers take as ``environment_factory``.

As there, the public methods but ``reset`` and ``get_reward`` are the tools, the text of ``reset`` ends the
prompt, and a reply without a call ends the episode. ``reset`` gets the seed if it takes one; there are no
columns of a data set.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

from engine.errors import ConfigError
from engine.pools import KEY, paid, program, resolve, text
from sandbox import contract, tool_calls


class Toolbox:
    """An instance of a class with its tools."""

    CLASS: ClassVar[str]

    def __init__(self, max_turns: int = 25) -> None:
        self.max_turns = max_turns
        self.env = resolve(self.CLASS)()
        self.tools = {name: getattr(self.env, name) for name in _tools(type(self.env))}

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        self.turn = 0
        told = self.env.reset(**contract.accepted(self.env.reset, {"seed": seed}))
        lines = [
            f"- {name}{inspect.signature(tool)}: {(inspect.getdoc(tool) or '').partition(chr(10))[0]}"
            for name, tool in self.tools.items()
        ]
        return "\n\n".join(
            [*([text(told)] if told else ()), "\n".join(["Tools:", *lines]), tool_calls.HOW]
        ), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out the calls of an action; end the episode when there is none or no turn is left."""
        self.turn += 1
        try:
            said = tool_calls.parse(action)
        except tool_calls.Unreadable as error:
            over = "{" not in action
            results = [] if over else [f"Error: {error}"]
        else:
            results = [self._call(call) for call in said.calls]
            over = not said.calls or said.answer is not None
        over = over or self.turn >= self.max_turns
        return "\n".join(results), paid(self.env.get_reward()) if over else 0.0, over, False, {}

    def _call(self, call: tool_calls.ToolCall) -> str:
        try:
            return text(self.tools[call.name](**call.arguments))
        except Exception as error:  # as TRL does: the model reads it
            return f"Error in {call.name}: {error!r}"


def _tools(kind: type) -> list[str]:
    methods = [name for name, _ in inspect.getmembers(kind, inspect.isfunction)]
    return [name for name in methods if name not in ("reset", "get_reward") and not name.startswith("_")]


def read(argument: str) -> Iterator[tuple[str, str]]:
    """Yield a program for each class. Raises ConfigError."""
    for path in argument.split(","):
        kind = resolve(path)
        parts = [getattr(kind, name, None) for name in ("reset", "get_reward", *_tools(kind))]
        if len(parts) < 3 or not all(map(callable, parts)) or any(map(inspect.iscoroutinefunction, parts)):
            raise ConfigError(
                f"{path} must have reset, get_reward and at least one method more, none of them async.",
                where=KEY,
                remedy="The reward of a pool's program is its own: move that of reward_funcs to get_reward.",
            )
        yield f"trl/{path}", program(Toolbox, path.partition(":")[2], CLASS=path)


def preload(argument: str) -> list[str]:
    """Return the modules of the classes."""
    return [__name__, *dict.fromkeys(path.partition(":")[0] for path in argument.split(","))]
