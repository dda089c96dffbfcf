"""BFCL v4 from the package ``bfcl-eval``: multi-turn by its backends, single-turn by its AST checker.

The package keeps backends in module globals under a name of the model and evaluates calls as text. Here each
step makes all calls so far again, in another process, on fresh backends that are removed afterwards; that
takes less than a millisecond, and nothing can leak into another play. A call is written from its JSON
arguments, by ``repr``, and only for a tool of the entry.
"""

from __future__ import annotations

import importlib
import json
import keyword
import os
import random
import resource
import sys
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

from engine import model_cache
from engine.config import Config, SamplingConfig
from engine.evals.suite import Content, Item, Outcome, Reply, Seat, Suite, paper_and_smoke, spread, version_of

MULTI_TURN = tuple(f"multi_turn_{kind}" for kind in ("base", "miss_func", "miss_param", "long_context"))
NON_LIVE = ("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple")
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
UNANSWERED = ("irrelevance", "live_irrelevance", "live_relevance")
STEPS = 20
"""Steps of a turn; one more, and the entry has failed."""
MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"
_SECONDS = 120.0
_MEMORY = 4 << 30
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string", "hashmap": "object"}
_TYPES |= {"arraylist": "array", "double": "number", "long": "integer", "char": "string", "short": "integer"}
_KNOWN = ("object", "number", "array", "string", "integer", "boolean")
_NAMES = {"javascript": "JAVASCRIPT", "java": "JAVA"}

Turns = list[list[list[str]]]
"""The calls of a play: turn, step, call."""


@cache
def package() -> Any:
    """Import the package, which writes folders where it is told to."""
    os.environ.setdefault("BFCL_PROJECT_ROOT", str(model_cache.directory() / "bfcl"))
    settings: Any = ModuleType("bfcl_eval.constants.model_config")
    # the real one imports the client of every vendor; names of functions have no dots here
    settings.MODEL_CONFIG_MAPPING = defaultdict(lambda: _Dotless)
    sys.modules.setdefault(settings.__name__, settings)
    return importlib.import_module("bfcl_eval.utils")


class _Dotless:
    underscore_to_dot = True


@cache
def entries(category: str) -> list[tuple[dict[str, Any], list[Any]]]:
    """Return the entries of a category with their right answers ([] where it has none)."""
    answers = {}
    if category not in UNANSWERED:
        answers = {one["id"]: one["ground_truth"] for one in package().load_ground_truth_entry(category)}
    return [(one, answers.get(one["id"], [])) for one in package().load_dataset_entry(category)]


def execute(entry: dict[str, Any], steps: Sequence[Sequence[str]]) -> list[str]:
    """Make the calls of all ``steps`` on fresh backends; return the results of the last step."""
    _limit()
    package()
    utils = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils")
    name, results = _fresh_name(), list[str]()
    try:
        for step in steps:
            results, _ = utils.execute_multi_turn_func_call(
                func_call_list=list(step),
                initial_config=entry["initial_config"],
                involved_classes=entry["involved_classes"],
                model_name=name,
                test_entry_id=entry["id"],
                long_context="long_context" in entry["id"],
            )
    finally:
        _purge(utils, name)
    return [str(result) for result in results]


def check_turns(entry: dict[str, Any], right: list[Any], turns: Turns) -> str:
    """Return "" when a play ends in the right states with the right results, else what is wrong."""
    if len(turns) != len(right):
        return "the play did not reach its last turn"
    _limit()
    package()
    checker = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
    utils = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils")
    name, category = _fresh_name(), entry["id"].rsplit("_", 1)[0]
    try:
        found = checker.multi_turn_checker(turns, right, entry, category, name)
    finally:
        _purge(utils, name)
    return "" if found["valid"] else str(found.get("error_type") or "wrong")


def check_calls(entry: dict[str, Any], right: list[Any], calls: list[dict[str, Any]]) -> str:
    """Return "" when the calls of a single turn are right, else what is wrong."""
    category = entry["id"].rsplit("_", 1)[0]
    if "relevance" in category:
        wanted = "irrelevance" not in category
        return "" if bool(calls) is wanted else ("no call" if wanted else "a call that does not help")
    package()
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    languages = importlib.import_module("bfcl_eval.constants.enums").Language
    language = getattr(languages, _NAMES.get(category.rpartition("_")[2], "PYTHON"))
    made = [{call["name"]: call["arguments"]} for call in calls]
    try:
        found = checker.ast_checker(entry["function"], made, right, language, category, "spade")
    except Exception as error:  # its type checks stumble over values that they do not expect
        return f"{type(error).__name__}: {error}"[:200]
    return "" if found["valid"] else str(found.get("error_type") or "wrong")


def _fresh_name() -> str:
    return f"m{uuid.uuid4().hex}"  # it becomes part of a variable's name


def _purge(utils: Any, name: str) -> None:
    for key in [key for key in vars(utils) if key.startswith(name)]:
        del vars(utils)[key]


def _limit() -> None:
    """Bound the memory of this process: some tools compute powers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, hard))


def spelled(call: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return a call as Python text, None for one that is no call of ``names``."""
    arguments = call["arguments"]
    if call["name"] not in names or not all(
        key.isidentifier() and not keyword.iskeyword(key) for key in arguments
    ):
        return None
    return f"{call['name']}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def tool(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's document as a tool of a chat template: JSON schema, no dots in the name."""
    function = {
        "name": document["name"].replace(".", "_"),
        "description": document.get("description", ""),
        "parameters": _schema(document.get("parameters", {"type": "dict", "properties": {}})),
    }
    return {"type": "function", "function": function}


def _schema(found: Any) -> Any:
    if isinstance(found, list):
        return [_schema(one) for one in found]
    if not isinstance(found, dict):
        return found
    made = {key: _schema(value) for key, value in found.items()}
    kind = found.get("type")
    if isinstance(kind, str):
        plain = _TYPES.get(kind.lower(), kind.lower())
        made["type"] = plain if plain in _KNOWN else "string"
    return made


class Bfcl(Suite):
    """The categories of one suite as its groups."""

    version = version_of("bfcl-eval")
    presets: ClassVar = paper_and_smoke(SamplingConfig(temperature=0.0, max_tokens=4096), smoke_items=8)
    needs = ("bfcl_eval", "filelock", "mpmath")
    categories: ClassVar[tuple[str, ...]]

    def items(self, count: int, seed: int) -> Sequence[Item]:
        found = [
            Item(name=entry["id"], group=category, text=_words(entry), data=(entry, right))
            for category in self.categories
            for entry, right in entries(category)
        ]
        return spread(found, count)

    def guess(self, item: Item, messages: Sequence[str], rng: random.Random) -> str:
        """Call a tool without arguments every second time."""
        if rng.random() < 0.5:
            return "I do not know."
        name = tool(rng.choice(item.data[0]["function"]))["function"]["name"]
        return f"<tool_call>{json.dumps({'name': name, 'arguments': {}})}</tool_call>"


class MultiTurn(Bfcl):
    """``bfcl-multi-turn``: the states and results after each turn have to be those of the right calls."""

    categories = MULTI_TURN

    async def play(self, item: Item, seat: Seat) -> Outcome:
        entry, right = item.data
        functions = list(entry["function"])
        messages: list[Content] = []
        turns: Turns = []
        for number, asked in enumerate(entry["question"]):
            more = entry.get("missed_function", {}).get(str(number), [])
            functions += more
            text = MORE_FUNCTIONS if more else "\n".join(one["content"] for one in asked)
            messages.append(text)
            turns.append([])
            tools = [tool(one) for one in functions]
            names = [one["function"]["name"] for one in tools]
            while True:
                reply = await seat.ask(messages, tools=tools)
                messages.append(reply.whole)
                if not reply.calls or reply.cut:
                    break
                if len(turns[-1]) == STEPS:
                    return Outcome(score=0.0, reason=f"more than {STEPS} steps in a turn")
                written = [spelled(call, names) for call in reply.calls]
                turns[-1].append([one for one in written if one is not None])
                messages.append(await self._results(entry, turns, written, seat))
        try:
            wrong = await seat.work(check_turns, entry, right, turns, seconds=_SECONDS)
        except (TimeoutError, MemoryError):
            wrong = "the calls took too long"
        return Outcome(score=float(not wrong), reason=wrong, detail={"turns": turns})

    async def _results(
        self, entry: dict[str, Any], turns: Turns, written: Sequence[str | None], seat: Seat
    ) -> list[tuple[str, str]]:
        steps = [step for turn in turns for step in turn]
        try:
            results = iter(await seat.work(execute, entry, steps, seconds=_SECONDS))
        except (TimeoutError, MemoryError):
            results = iter(["Error during execution: it took too long."] * len(written))
        refused = "Error: there is no such function, or an argument has no name."
        return [("tool", refused if one is None else next(results)) for one in written]


class SingleTurn(Bfcl):
    """``bfcl-single-turn``: the calls of one reply have to be the right ones."""

    categories = (*NON_LIVE, *LIVE, *UNANSWERED)

    async def play(self, item: Item, seat: Seat) -> Outcome:
        entry, right = item.data
        system, messages = _conversation(entry["question"][0])
        tools = [tool(one) for one in entry["function"]]
        reply: Reply = await seat.ask(messages, system=system, tools=tools)
        if reply.fault or reply.cut:
            return Outcome(score=0.0, reason=reply.fault or "reply cut at its length limit")
        wrong = await seat.work(check_calls, entry, right, list(reply.calls), seconds=_SECONDS)
        return Outcome(score=float(not wrong), reason=wrong, detail={"calls": list(reply.calls)})


def _conversation(messages: Sequence[Mapping[str, str]]) -> tuple[str | None, list[Content]]:
    """Return the system message and the turns, texts of one speaker in a row joined."""
    system = "\n".join(one["content"] for one in messages if one["role"] == "system") or None
    turns: list[tuple[str, str]] = []
    for one in messages:
        if one["role"] == "system":
            continue
        if turns and turns[-1][0] == one["role"]:
            turns[-1] = (one["role"], f"{turns[-1][1]}\n{one['content']}")
        else:
            turns.append((one["role"], one["content"]))
    return system, [text for _, text in turns]


def _words(entry: Mapping[str, Any]) -> str:
    return "\n".join(one["content"] for turn in entry["question"] for one in turn)


def multi_turn(argument: str, config: Config) -> MultiTurn:
    """Return ``bfcl-multi-turn``."""
    return MultiTurn()


def single_turn(argument: str, config: Config) -> SingleTurn:
    """Return ``bfcl-single-turn``."""
    return SingleTurn()
