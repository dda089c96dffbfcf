"""The rungs of tool environments: their criteria, and the plan that fulfils them.

The predicates are the design's own code and decide about the reward, so each is watched: false at the start,
an exact boolean on every state that is met, and made true by a tool call of the reference plan.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sandbox.errors import EnvError, EnvFailure, EnvProtocolError
from sandbox.probes import solution_actions, tell
from sandbox.schema import SchemaError, require_sound
from sandbox.tools import MAX_TOOLS
from sandbox.trial import Rejected, Trial

_PLANS = 3


async def examine(trial: Trial) -> None:
    """Raise Rejected unless the criteria of several instances begin false and the plan fulfils each."""
    trial.toolbox = read_tools(await _call(trial, "get_tools", ""))
    for number, seed in enumerate(trial.seeds()):
        await trial.open(seed)
        met = await _criteria(trial, f"after reset({seed})")
        trial.criteria = len(met)
        if any(met):
            which = met.index(True) + 1
            raise Rejected(
                "criteria", f"criterion {which} is true already after reset({seed}); there is nothing to do"
            )
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
        # begun again: asking must not change the world
        await trial.open(seed)
    except EnvFailure as error:
        raise Rejected("criteria", f"plan(): {tell(error)}") from None
    reached = [False] * trial.criteria
    over, failed, taken = False, "", 0
    for action in actions[: trial.turns]:
        taken += 1
        try:
            step = await trial.instance.step(action)
        except EnvFailure as error:
            raise Rejected("criteria", f"the plan's {action}: {tell(error)}") from None
        failed = failed or next((line for line in step.observation.splitlines() if "Error" in line[:40]), "")
        for index, met in enumerate(await _criteria(trial, f"after the plan's {action}")):
            reached[index] = reached[index] or met
        over = step.done
        if over:
            break
    if not all(reached):
        which = reached.index(False) + 1
        why = f" ({failed[:160]})" if failed else ""
        raise Rejected("criteria", f"no call of the plan makes criterion {which} true for seed {seed}{why}")
    if not over:
        limit = f" within {trial.turns} turns" if taken < len(actions) else ""
        raise Rejected("criteria", f"the plan does not bring the episode to its end{limit} for seed {seed}")


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
