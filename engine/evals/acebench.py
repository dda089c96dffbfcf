"""ACEBench's agent categories from a folder of yours: its data and its state machines are not ours to ship.

The folder is a checkout of ACEBench: ``data_agent_multi_step.json`` and ``data_agent_multi_turn.json`` with
their possible answers, and the modules of the simulated phone and travel agency. The modules run in another
process. As for BFCL, each step makes all calls so far again on fresh objects, so no state is shared.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from engine.config import Config, SamplingConfig
from engine.evals.bfcl import tool
from engine.evals.suite import Content, Item, Outcome, Seat, Suite, paper_and_smoke, spread

KINDS = ("multi_step", "multi_turn")
STEPS = 40
FINISH = "finish conversation"
_SECONDS = 300.0
_BASE = "BaseApi"
_MODULES = {
    "MessageApi": "message",
    "ReminderApi": "reminder",
    "FoodPlatform": "food_services",
    "Travel": "travel",
}
# The attributes of each class whose end state is compared.
_STATE = {
    _BASE: ("wifi", "logged_in"),
    "MessageApi": ("inbox",),
    "ReminderApi": ("reminder_list",),
    "FoodPlatform": ("users", "logged_in_users", "orders"),
    "Travel": ("users", "reservations"),
}
_IMPORT = re.compile(r"^from \S*base_api import .*$", re.MULTILINE)
_AGENT = f"""You carry out the user's task with the tools. Call them step by step, and use what you were told.
When the task is done, answer "{FINISH}".

"""
_USER = f"""You play a user who talks with an agent. Your instruction: {{instruction}}

Write one message at a time, in your own words, with what the agent needs for the next step and no more.
Invent nothing that the instruction does not say. When all of it is done, write "{FINISH}" alone on a line."""
_OPENING = "Is there anything I can help you with today?"
_NUDGE = "Ask no questions; use the known conditions to solve the problem."

Call = dict[str, Any]


def find(folder: Path, name: str, *, answers: bool = False) -> Path | None:
    """Return the English file ``name`` below ``folder``, of the possible answers or not."""
    found = [
        path
        for path in sorted(folder.rglob(name))
        if ("possible_answer" in str(path.relative_to(folder))) is answers
        and not re.search(r"(?:_|/|scenarios)zh(?:/|_|$)", str(path.relative_to(folder).parent))
    ]
    return found[0] if found else None


def classes(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Load the state machines; a module's import of the base class is answered with the folder's own."""
    space: dict[str, Any] = {}
    for module in dict.fromkeys(["base_api", *(_MODULES[name] for name in names if name in _MODULES)]):
        path = find(folder, f"{module}.py")
        if path is None:
            raise FileNotFoundError(f"{module}.py below {folder}")
        exec(compile(_IMPORT.sub("", path.read_text(encoding="utf-8")), str(path), "exec"), space)
    return {name: space[name] for name in names}


def replay(
    folder: str, entry: dict[str, Any], steps: Sequence[Sequence[Call]]
) -> tuple[list[str], list[Any]]:
    """Make all calls on fresh objects; return the results of the last step and the end state."""
    objects: dict[str, Any] = {}
    for name, kind in classes(Path(folder), entry["involved_classes"]).items():
        objects[name] = kind()
        for part in (name, _BASE):
            objects[name]._load_scenario(copy.deepcopy(entry["initial_config"].get(part, {})))
    results: list[str] = []
    for step in steps:
        results = [_made(call, objects) for call in step]
    state = [
        {name: {key: value for key, value in vars(one).items() if key in _STATE[name]}}
        for name, one in objects.items()
    ]
    return results, json.loads(json.dumps(state, default=str))


def _made(call: Call, objects: dict[str, Any]) -> str:
    """Make a call on each object that has the method: so the parts of the phone share their state."""
    name = call["name"]
    methods = [getattr(one, name, None) for one in objects.values() if not name.startswith("_")]
    result: Any = f"Error: there is no function {name}."
    try:
        for method in filter(callable, methods):
            result = method(**call["arguments"])
    except Exception as error:  # the agent is told, as by the benchmark's own executor
        result = f"Error during execution: {error}"
    return result if isinstance(result, str) else json.dumps(result, default=str)


def same_state(state: Sequence[dict[str, Any]], right: Any) -> bool:
    """Compare end states: every class, every attribute, and of dictionaries the keys that are expected."""
    expected = right if isinstance(right, list) else [right]
    if len(expected) != len(state):
        return False
    ours = {next(iter(one)): next(iter(one.values())) for one in state}
    theirs = {next(iter(one)): next(iter(one.values())) for one in expected}
    return ours.keys() == theirs.keys() and all(
        key in theirs[name] and _same(value, theirs[name][key])
        for name, attributes in ours.items()
        for key, value in attributes.items()
    )


def _same(value: Any, expected: Any) -> bool:
    if isinstance(expected, dict) and isinstance(value, dict):
        return all(key in value and value[key] == one for key, one in expected.items())
    return bool(value == expected)


class AceBench(Suite):
    """``acebench-agent:FOLDER``: an item is right when its end state is the expected one."""

    version = "ACEBench agent (en), calls in the model's own format"
    baselines: ClassVar = ("null",)
    presets: ClassVar = paper_and_smoke(SamplingConfig(temperature=0.7, max_tokens=16384))

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def available(self) -> str:
        if not self.folder:
            return "it has no data: name a checkout of ACEBench, acebench-agent:FOLDER"
        for kind in KINDS:
            name = f"data_agent_{kind}.json"
            if None in (find(Path(self.folder), name, answers=answers) for answers in (False, True)):
                return f"there is no {name}, or no possible answers to it, below {self.folder}"
        return ""

    def items(self, count: int, seed: int) -> Sequence[Item]:
        return spread(list(self._read()), count)

    def _read(self) -> Iterator[Item]:
        for kind in KINDS:
            files = [
                find(Path(self.folder), f"data_agent_{kind}.json", answers=answers)
                for answers in (False, True)
            ]
            entries, answers = (
                [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
                for file in files
                if file
            )
            right = {one["id"]: one["ground_truth"] for one in answers}
            for entry in entries:
                yield Item(
                    name=entry["id"], group=kind, text=entry["question"], data=(entry, right[entry["id"]])
                )

    async def play(self, item: Item, seat: Seat) -> Outcome:
        entry, right = item.data
        steps = await self._talk(entry, seat, simulated=item.group == "multi_turn")
        return await self._judged(entry, right, steps, seat)

    async def null(self, item: Item, seat: Seat) -> Outcome:
        entry, right = item.data
        return await self._judged(entry, right, [], seat)

    def guess(self, item: Item, messages: Sequence[str], rng: random.Random) -> str:
        return FINISH

    async def _judged(
        self, entry: dict[str, Any], right: Any, steps: list[list[Call]], seat: Seat
    ) -> Outcome:
        _, state = await seat.work(replay, self.folder, entry, steps, seconds=_SECONDS)
        won = same_state(state, right)
        return Outcome(score=float(won), reason="" if won else "another end state", detail={"steps": steps})

    async def _talk(self, entry: dict[str, Any], seat: Seat, *, simulated: bool) -> list[list[Call]]:
        """Let the agent work until somebody finishes; return its calls."""
        user, tools = seat.other(), [tool(one) for one in entry["function"]]
        asked: list[Content] = [_OPENING]
        instruction = _USER.format(instruction=entry["question"])

        async def user_says() -> str:
            reply = await user.ask(asked, system=instruction)
            asked.append(reply.whole)
            return reply.text.strip()

        first = await user_says() if simulated else entry["question"]
        turns: list[Content] = [first]
        steps: list[list[Call]] = []
        for _ in range(STEPS):
            reply = await seat.ask(turns, system=_AGENT + entry.get("time", ""), tools=tools)
            turns.append(reply.whole)
            if reply.calls:
                steps.append(list(reply.calls))
                results, _ = await seat.work(replay, self.folder, entry, steps, seconds=_SECONDS)
                turns.append([("tool", result) for result in results])
                continue
            if FINISH in reply.text or reply.cut:
                break
            if simulated:
                asked.append(reply.text)
            answer = await user_says() if simulated else _NUDGE
            if FINISH in answer:
                break
            turns.append(answer)
        return steps


def agent(argument: str, config: Config) -> AceBench:
    """Return ``acebench-agent:FOLDER``."""
    return AceBench(argument)
