"""The rungs of tool environments: their criteria, and the plan that fulfils them.

The predicates are the design's own code and decide about the reward, so each is watched: an exact boolean on
every state that is met, false when its turn comes, and made true by a call of the reference plan.
No call of the plan is refused, and its words can be found: in the text, in the tools or in what they answer.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from sandbox.errors import EnvError, EnvFailure, EnvProtocolError
from sandbox.probes import solution_actions, tell
from sandbox.schema import SchemaError, require_sound
from sandbox.tools import MAX_TOOLS
from sandbox.trial import Rejected, Trial

_PLANS = 3
_REFUSED = re.compile(r"^Error(?: in \w+)?: .*", re.MULTILINE)
_WORD = re.compile(r"[^\W_]{3,}")
_FREE = " so to speak"


async def examine(trial: Trial) -> None:
    """Raise Rejected unless the criteria of several instances begin false and the plan fulfils each."""
    trial.toolbox = read_tools(await _call(trial, "get_tools", ""))
    for number, seed in enumerate(trial.seeds()):
        await trial.open(seed)
        met = await _criteria(trial, f"after reset({seed})")
        trial.criteria = len(met)
        if met[0]:
            raise Rejected("criteria", f"criterion 1 is true already after reset({seed})")
        if number == 0 and await _criteria(trial, "a second time") != met:
            raise Rejected("criteria", "the criteria change when they are evaluated; they must only look")
        if number < _PLANS:
            await _follow(trial, seed)


def read_tools(value: object) -> list[dict[str, Any]]:
    """Check what ``get_tools`` returned, which came from the program's process.

    Raises EnvProtocolError: the base class makes it, so that an honest one is sound.
    """
    try:
        found = msgspec.convert(value, type=list[_Tool])
        for tool in found:
            require_sound(tool.function.parameters)
    except (msgspec.ValidationError, SchemaError) as error:
        raise EnvProtocolError(f"get_tools() did not return tools: {str(error)[:200]}") from None
    if not 0 < len(found) <= MAX_TOOLS:
        raise EnvProtocolError(f"get_tools() returned {len(found)} tools, 1 to {MAX_TOOLS} are allowed")
    return [msgspec.to_builtins(tool) for tool in found]


class _Function(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    parameters: dict[str, Any]
    description: str = ""


class _Tool(msgspec.Struct, frozen=True):
    function: _Function
    type: str = "function"


async def _follow(trial: Trial, seed: int) -> None:
    """Carry the plan out and see which of its calls makes which criterion true."""
    try:
        actions = solution_actions(await trial.instance.call("solution"))
    except EnvFailure as error:
        raise Rejected("criteria", f"plan(): {tell(error)}") from None
    reached, seen = await _carry_out(trial, seed, actions)
    if reached < trial.criteria:
        raise Rejected("criteria", f"no call of the plan makes criterion {reached + 1} true for seed {seed}")
    unseen = _unseen(actions, seen + json.dumps(trial.toolbox, ensure_ascii=False))
    if unseen:
        unseen = _unseen(actions, seen + await _look(trial, seed))
    for word in sorted(unseen):
        other = [action.replace(word, word + _FREE) for action in actions]
        with contextlib.suppress(Rejected):
            if (await _carry_out(trial, seed, other))[0] == trial.criteria:
                continue
        raise Rejected("criteria", f"the plan needs {word!r} for seed {seed}, which nothing tells the player")


async def _carry_out(trial: Trial, seed: int, actions: Sequence[str]) -> tuple[int, str]:
    """Play ``actions`` from a reset on; return how many criteria came true in turn, and all that was read.

    Raises Rejected for a refused call, an error, a step that is done before its turn, and no end.
    """
    seen = [await trial.open(seed)]  # begun again: asking must not change the world
    done, ended = 0, False
    reached = [False] * trial.criteria
    for action in actions[: trial.turns]:
        try:
            step = await trial.instance.step(action)
        except EnvFailure as error:
            raise Rejected("criteria", f"the plan's {action}: {tell(error)}") from None
        seen.append(step.observation)
        refused = _REFUSED.search(step.observation)
        if refused:
            raise Rejected("criteria", f"the plan's {action} for seed {seed}: {refused[0][:160]}")
        for index, true in enumerate(await _criteria(trial, f"after the plan's {action}")):
            reached[index] = reached[index] or true
        made, now = _read(action), step.instructions[0] if step.instructions else done
        if now - done > (len(made) if isinstance(made, list) else 1):
            raise Rejected("criteria", f"criterion {now} is true before its turn for seed {seed}")
        done, ended = now, step.done
        if ended:
            break
    met = reached.index(False) if False in reached else trial.criteria
    if met == trial.criteria and not ended:
        limit = f" within {trial.turns} turns" if len(actions) > trial.turns else ""
        raise Rejected("criteria", f"the plan does not bring the episode to its end{limit} for seed {seed}")
    return met, "\n".join(seen)


def _unseen(actions: Sequence[str], seen: str) -> set[str]:
    """Return the words in arguments of ``actions`` that ``seen`` does not hold, but for an ending.

    A number is none: it may have been worked out.
    """
    known = seen.casefold()
    words = {word for action in actions for text in _texts(_read(action)) for word in _WORD.findall(text)}
    stems = {word: word[: max(3, len(word) - 2)] if word.isalpha() else word for word in words}
    return {word for word, stem in stems.items() if not word.isdigit() and stem.casefold() not in known}


def _read(action: str) -> object:
    """Return the JSON of an action; None when it is none: a forged plan may be anything."""
    try:
        return json.loads(action)
    except (ValueError, RecursionError):
        return None


def _texts(value: object) -> Iterator[str]:
    """Yield the texts among the arguments of an action."""
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item)
        case {"name": str(), "arguments": Mapping() as arguments}:
            yield from _texts(list(arguments.values()))
        case Mapping() if not {"reply", "answer"} & set(value):
            yield from _texts([*value, *value.values()])


async def _look(trial: Trial, seed: int) -> str:
    """Return what the tools answer that need no argument."""
    seen = [json.dumps(trial.toolbox, ensure_ascii=False)]
    for tool in trial.toolbox:
        function = tool["function"]
        if not function["parameters"].get("required"):
            await trial.open(seed)
            with contextlib.suppress(EnvError):
                seen.append(str(await trial.instance.call("execute_tool", function["name"], {})))
    return "\n".join(seen)


async def _criteria(trial: Trial, when: str) -> list[bool]:
    met = await _call(trial, "criteria_met", f"the criteria cannot be evaluated {when}")
    if not isinstance(met, list) or not met or not all(isinstance(one, bool) for one in met):
        raise EnvProtocolError("criteria_met() did not return booleans")
    return met


async def _call(trial: Trial, name: str, complaint: object) -> object:
    try:
        return await trial.instance.call(name)
    except EnvError as error:
        raise Rejected("criteria", f"{complaint or name}: {tell(error)}") from None
