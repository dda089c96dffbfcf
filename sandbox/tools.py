"""The base class of tool environments. Stdlib only: it runs beside the program.

A design supplies a state from a seed, tools, instructions with predicates, and a plan; the base class owns
the order of the instructions, the turns, the arguments' schemas, the criteria, the final answer and the
reward. Unlike the reference's base class (reference spec 9.1, 9.2), every action counts as a turn, calls
in one action are carried out in order, and progress is never the design's own code.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from sandbox import schema, tool_calls
from sandbox.contract import ContractError, exact_bool

OWNED = ("reset", "step", "get_tools", "execute_tool", "criteria_met", "messages", "solution")
PREFIX = "tool_"
MAX_INSTRUCTIONS, MAX_TOOLS, MAX_RESULT = 12, 24, 4000
_NOT_YET = "That is not done yet."
_ANSWER = 'All instructions are done. Give the final answer: {"answer": "..."}'
Predicate = Callable[[Any], bool]


class ToolError(Exception):
    """A tool tells the player why it did not work."""


def REPLY(state: Any) -> bool:
    """Stand for a predicate: the right act is to say something to the user and to change nothing.

    It serves requests that lack something, and those that no tool can fulfil.
    """
    return False


class Tool(NamedTuple):
    name: str
    function: Callable[..., Any]
    description: str
    parameters: dict[str, Any]

    def signature(self) -> str:
        """One line for the player."""
        required = self.parameters.get("required", ())
        parts = [
            f"{name}: {schema.wanted(inner)}" + ("" if name in required else " (optional)")
            for name, inner in self.parameters.get("properties", {}).items()
        ]
        return f"{self.name}({', '.join(parts)})"


class ToolEnv:
    """Derive from it, in a class whose name ends in ``Env``.

    ``setup(rng)`` returns the state of a new instance; methods ``tool_<name>`` with type hints are the
    tools (``schemas[name]`` replaces the schema of their arguments); ``instructions()`` returns pairs of a
    text and a predicate over the state (or :func:`REPLY`), in order; ``plan()`` returns what fulfils them;
    ``answer()``, asked once after ``setup``, returns the expected final answer or None. ``scoring`` pays
    for all of them together or each its share, at the end of the episode only.

    A tool that cannot do what it is asked raises ToolError, ValueError or LookupError: the player sees the
    text. Any other exception is a fault of the program.
    """

    max_turns: int = 10
    scoring: Literal["all", "share"] = "all"
    intro: str = ""
    schemas: ClassVar[Mapping[str, Any]] = {}

    state: Any
    __tools: dict[str, Tool] | None = None
    __steps: tuple[tuple[str, Predicate], ...] = ()
    __expected: str | int | float | None = None
    __turn = __done = 0
    __over = True
    __shown = ""
    __messages: tuple[tuple[str, str], ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        taken = [name for name in OWNED if getattr(cls, name) is not getattr(ToolEnv, name)]
        if taken:
            raise ContractError(f"{cls.__name__} defines {taken[0]}, which ToolEnv owns")

    def __init__(self, max_turns: int | None = None, **_: Any) -> None:
        """Collect the tools of the design; ``max_turns`` can only lower the design's own."""
        if type(self.max_turns) is not int or self.max_turns < 1:
            raise ContractError(f"max_turns must be a whole number of at least 1, not {self.max_turns!r}")
        if max_turns is not None:
            self.max_turns = min(self.max_turns, max_turns)
        self.__tools = self.__collect()

    def setup(self, rng: random.Random) -> Any:
        """Return the state of a new instance, drawn from ``rng``."""
        raise ContractError("a tool environment needs setup(rng), which returns its state")

    def instructions(self) -> Iterable[tuple[str, Predicate]]:
        """Return pairs of an instruction and the predicate over the state that says it is done."""
        raise ContractError("a tool environment needs instructions(): pairs of a text and a predicate")

    def plan(self) -> Iterable[Any]:
        """Return the acts that fulfil all instructions.

        They are pairs (name, arguments), lists of such pairs for several calls in one turn, or texts to say.
        """
        raise ContractError("a tool environment needs plan(): the calls that fulfil its instructions")

    def answer(self) -> str | int | float | None:
        """Return the expected final answer; None when none is asked for."""
        return None

    def reset(self, seed: int = 0) -> tuple[str, dict[str, Any]]:
        """Draw a new instance; the observation holds the first instruction only."""
        if self.__tools is None:
            self.__tools = self.__collect()
        if self.scoring not in ("all", "share"):
            raise ContractError(f'scoring must be "all" or "share", not {self.scoring!r}')
        state = self.setup(random.Random(seed))
        if state is None and "state" not in vars(self):
            raise ContractError("setup(rng) must return the state")
        self.state = vars(self)["state"] if state is None else state
        self.__steps = _read_steps(self.instructions())
        self.__expected = _read_expected(self.answer())
        self.__turn = self.__done = 0
        self.__over = False
        self.__shown = repr(self.state)
        opening = (self.intro.strip(), self.__steps[0][0])
        self.__messages = (("user", "\n\n".join(part for part in opening if part)),)
        return self.__opening(), self.__info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out the calls of ``action`` in order, then judge its final answer, if it has one.

        A text to the user counts where there is no call beside it.
        """
        if self.__over:
            return "The episode is over.", 0.0, False, True, self.__info()
        self.__turn += 1
        before = self.__done
        given: str | None = None
        try:
            turn = tool_calls.parse(action)
        except tool_calls.Unreadable as error:
            lines = [f"Error: {error}"]
            results = list(lines)
        else:
            results = [self.__run(call) for call in turn.calls]
            lines = [self.__named(call, result) for call, result in zip(turn.calls, results, strict=True)]
            given = turn.answer
            if not turn.calls and given is None:
                self.__hear()
        if given is not None:
            return self.__finish(lines, given)
        if self.__done == len(self.__steps) and self.__expected is None:
            return self.__finish(lines, None)
        news = self.__news(before)
        if news:
            self.__shown = repr(self.state)
        user = self.__next() if news else "" if results else _NOT_YET
        lines += news or ([] if results else [_NOT_YET])
        self.__messages = (*(("tool", text) for text in results), *([("user", user)] if user else ()))
        if self.__turn >= self.max_turns:
            self.__over = True
            return "\n".join([*lines, "No turns are left."]), 0.0, False, True, self.__info()
        lines.append(f"Turn {self.__turn} of {self.max_turns}.")
        return "\n".join(lines), 0.0, False, False, self.__info()

    def get_tools(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates take them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                },
            }
            for tool in (self.__tools or {}).values()
        ]

    def execute_tool(self, name: str, arguments: dict[str, Any] | None = None) -> str:
        """Carry out one call and return its text. Counts no turn and never ends the episode."""
        call = tool_calls.ToolCall(name, {} if arguments is None else arguments)
        return self.__named(call, self.__run(call))

    def messages(self) -> list[tuple[str, str]]:
        """Return the last observation as a chat: pairs of a role ("tool" or "user") and a text.

        Each call has its result; a new instruction is the user's.
        """
        return list(self.__messages)

    def criteria_met(self) -> list[bool]:
        """Evaluate every predicate on the present state, in order."""
        return [self.__holds(number) for number in range(len(self.__steps))]

    def solution(self) -> list[str]:
        """Return the actions of :meth:`plan`, one a turn, and the final answer where one is expected."""
        actions = []
        for entry in self.plan():
            if isinstance(entry, str):
                actions.append(json.dumps({"reply": entry}, ensure_ascii=False))
                continue
            made = [_planned(one) for one in (entry if isinstance(entry, list) else [entry])]
            actions.append(json.dumps(made[0] if len(made) == 1 else made, ensure_ascii=False))
        if self.__expected is not None:
            actions.append(json.dumps({"answer": self.__expected}, ensure_ascii=False))
        return actions

    def __collect(self) -> dict[str, Tool]:
        found: dict[str, Tool] = {}
        for attribute in dir(type(self)):
            function = getattr(self, attribute)
            if not attribute.startswith(PREFIX) or not callable(function):
                continue
            name = attribute.removeprefix(PREFIX)
            try:
                parameters = dict(
                    self.schemas[name] if name in self.schemas else schema.of_function(function)
                )
                schema.require_sound(parameters)
            except schema.SchemaError as error:
                raise ContractError(f"{attribute}: {error}") from None
            lines = (function.__doc__ or name.replace("_", " ")).strip().splitlines()
            found[name] = Tool(name, function, lines[0].strip(), parameters)
        stray = sorted(set(self.schemas) - set(found))
        if stray:
            raise ContractError(f"schemas names {stray[0]!r}, but there is no method {PREFIX}{stray[0]}")
        if not 0 < len(found) <= MAX_TOOLS:
            raise ContractError(f"{len(found)} methods {PREFIX}*; a tool environment has 1 to {MAX_TOOLS}")
        return found

    def __run(self, call: tool_calls.ToolCall) -> str:
        tools = self.__tools or {}
        tool = tools.get(call.name)
        if tool is None:
            return f"Error in {call.name}: there is no tool {call.name!r}; the tools are {', '.join(tools)}."
        # called by hand with something else than an object
        where = "" if isinstance(call.arguments, dict) else "the arguments"
        wrong = schema.problems(call.arguments, tool.parameters, where)
        if wrong:
            return f"Error in {call.name}: {'; '.join(wrong[:3])}. Use {tool.signature()}."
        try:
            result = tool.function(**call.arguments)
        except (ToolError, ValueError, LookupError) as error:
            return f"Error in {call.name}: {str(error)[:MAX_RESULT] or type(error).__name__}"
        while self.__done < len(self.__steps) and self.__holds(self.__done):
            self.__done += 1
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return text[:MAX_RESULT]

    def __named(self, call: tool_calls.ToolCall, result: str) -> str:
        """Return a result as a line that says of which call."""
        return result if result.startswith("Error") else f"{call.name}: {result}"

    def __hear(self) -> None:
        """Take a text to the user: it fulfils an instruction that wants one, if nothing was changed."""
        wanted = self.__done < len(self.__steps) and self.__steps[self.__done][1] is REPLY
        self.__done += wanted and repr(self.state) == self.__shown

    def __next(self) -> str:
        """Return the user's next words."""
        return self.__steps[self.__done][0] if self.__done < len(self.__steps) else _ANSWER

    def __holds(self, number: int) -> bool:
        if self.__steps[number][1] is REPLY:
            return number < self.__done
        try:
            return exact_bool(self.__steps[number][1](self.state), "its value")
        except ContractError as error:
            raise ContractError(f"criterion {number + 1}: {error}") from None

    def __opening(self) -> str:
        parts = [self.intro.strip(), f"Instruction 1 of {len(self.__steps)}: {self.__steps[0][0]}"]
        lines = [f"- {tool.signature()}: {tool.description}" for tool in (self.__tools or {}).values()]
        parts.append("\n".join(["Tools:", *lines]))
        parts.append(tool_calls.HOW)
        parts.append(f"There are {self.max_turns} turns.")
        return "\n\n".join(part for part in parts if part)

    def __news(self, before: int) -> list[str]:
        """Return the lines about the instructions that were done in this turn."""
        lines = [f"Instruction {number + 1} is done." for number in range(before, self.__done)]
        if self.__done == len(self.__steps):
            return [*lines, _ANSWER]
        if lines:
            text = self.__steps[self.__done][0]
            lines.append(f"Instruction {self.__done + 1} of {len(self.__steps)}: {text}")
        return lines

    def __finish(self, lines: list[str], given: str | None) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.__over = True
        total, got = len(self.__steps), self.__done
        lines.append(f"{got} of {total} instructions are done.")
        if self.__expected is not None:
            right = given is not None and same_answer(self.__expected, given)
            lines.append("The final answer is right." if right else "The final answer is wrong.")
            total, got = total + 1, got + right
        reward = got / total if self.scoring == "share" else float(got == total)
        return "\n".join(lines), reward, True, False, self.__info()

    def __info(self) -> dict[str, Any]:
        return {"turn": self.__turn, "done": self.__done, "of": len(self.__steps)}


def keep(env: ToolEnv) -> dict[str, Callable[..., Any]]:
    """Return the base class's own methods of ``env``, by name, whatever is put over them later.

    Raises ContractError when something is put over them already.
    """
    for name, own in _OWN.items():
        if name in vars(env) or getattr(type(env), name, None) is not own:
            raise ContractError(f"{type(env).__name__} replaces {name}, which ToolEnv owns")
    return {name: partial(own, env) for name, own in _OWN.items()}


# taken when this is imported, before any program is there
_OWN: dict[str, Callable[..., Any]] = {name: vars(ToolEnv)[name] for name in OWNED}


def same_answer(expected: str | int | float, given: str) -> bool:
    """Equal as finite numbers, or as texts but for case and white space."""
    try:
        one, other = float(expected), float(given)
    except ValueError:
        return str(expected).casefold().split() == given.casefold().split()
    if math.isfinite(one) and math.isfinite(other):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)
    return str(expected).casefold() == given.casefold()


def _read_steps(value: Iterable[Any]) -> tuple[tuple[str, Predicate], ...]:
    steps = tuple(value)
    if not 0 < len(steps) <= MAX_INSTRUCTIONS:
        raise ContractError(f"{len(steps)} instructions; there must be 1 to {MAX_INSTRUCTIONS}")
    for number, step in enumerate(steps, 1):
        if not isinstance(step, tuple | list) or len(step) != 2:
            raise ContractError(f"instruction {number} must be a pair of a text and a predicate")
        if not isinstance(step[0], str) or not step[0].strip() or not callable(step[1]):
            raise ContractError(f"instruction {number} must be a pair of a text and a predicate")
    return tuple((text, predicate) for text, predicate in steps)


def _read_expected(value: object) -> str | int | float | None:
    if value is None or isinstance(value, str | int | float):
        return value
    raise ContractError(f"answer() must return text, a number or None, not {type(value).__name__}")


def _planned(entry: Any) -> dict[str, Any]:
    if isinstance(entry, Mapping):
        return dict(entry)
    if isinstance(entry, tuple) and len(entry) == 2:
        return {"name": entry[0], "arguments": dict(entry[1])}
    raise ContractError("plan() must return pairs (name, arguments), lists of such pairs, or texts")
