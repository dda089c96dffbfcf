"""Read tool calls and final answers in an action's text. Pure, stdlib only.

An action is one JSON object ``{"name": ..., "arguments": {...}}``, a list of such objects, or a text with
``<tool_call>`` blocks that hold them (the form of Qwen and Hermes models). The final answer is
``{"answer": ...}`` or ``<answer>...</answer>``; it may follow calls in the same action. ``{"reply": ...}`` is
a text to the user, ``{"unreadable": ...}`` says what is wrong with calls in a form that somebody else read.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, NoReturn

MAX_CALLS = 16
HOW = (
    'Call a tool with {"name": "...", "arguments": {...}}, several with a list of such objects; '
    'say something to the user with {"reply": "..."}; end with {"answer": "..."}.'
)
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_CALL_KEYS = frozenset(("name", "arguments", "parameters", "id", "type"))


class Unreadable(ValueError):
    """Neither a tool call nor a final answer."""


class ToolCall(NamedTuple):
    """One call of a tool by its name."""

    name: str
    arguments: dict[str, Any]


class ToolAction(NamedTuple):
    """The content of one action: ``calls`` in order, then perhaps the final ``answer``.

    Without both it is a text to the user.
    """

    calls: tuple[ToolCall, ...]
    answer: str | None


class _Told(Unreadable):
    """Calls that somebody else could not read; the message has their right form."""


def parse(action: str) -> ToolAction:
    """Read ``action``. Raises Unreadable; then no part of it is to be carried out."""
    try:
        return _parse(action.strip())
    except _Told:
        raise
    except Unreadable as error:
        raise Unreadable(f"{error} {HOW}") from None


def _parse(text: str) -> ToolAction:
    if _is_json(text):
        return _made([text], [])
    # searched only where an end follows: thousands of openings must not use up the program's time
    if text.rfind("<tool_call>") > text.rfind("</tool_call>"):
        raise Unreadable("A <tool_call> is not closed by </tool_call>.")
    blocks, rest = _BLOCK.findall(text), _BLOCK.sub("", text)
    if "<tool_call>" in rest:
        raise Unreadable("A <tool_call> is not closed by </tool_call>.")
    answers = _ANSWER.findall(rest, 0, rest.rfind("</answer>") + len("</answer>"))
    if not blocks and not answers:
        blocks = [_unfenced(text)]
        if not blocks[0].startswith(("{", "[")):
            raise Unreadable("This is neither a tool call nor a final answer.")
    return _made(blocks, answers)


def _is_json(text: str) -> bool:
    if not text.startswith(("{", "[")):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _made(blocks: list[str], answers: list[str]) -> ToolAction:
    calls: list[ToolCall] = []
    answer = answers[-1].strip() if answers else None
    for block in blocks:
        value = load(block.strip())
        if value == []:
            raise Unreadable("The list of calls is empty.")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and set(item) == {"unreadable"}:
                raise _Told(str(item["unreadable"]))
            if isinstance(item, dict) and set(item) == {"answer"}:
                answer = _answer(item["answer"])
            elif isinstance(item, dict) and set(item) == {"reply"}:
                _answer(item["reply"])
            else:
                calls.append(call(item))
    if len(calls) > MAX_CALLS:
        raise Unreadable(f"{len(calls)} calls in one turn, at most {MAX_CALLS} are carried out.")
    return ToolAction(tuple(calls), answer)


def _unfenced(text: str) -> str:
    """Return ``text`` without the fence of three backticks around all of it, if there is one."""
    if len(text) < 6 or not text.startswith("```") or not text.endswith("```"):
        return text
    return text[3:-3].removeprefix("json").strip()


def load(text: str) -> Any:
    """Decode JSON without its usual leniency: no NaN, no key twice. Raises Unreadable."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError:
        raise Unreadable("The JSON is nested too deeply.") from None
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(f"This is not valid JSON: {error}.") from None


def call(item: Any) -> ToolCall:
    """Return a call that was decoded from JSON. Raises Unreadable when its fields are not those of one."""
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise Unreadable('A call is an object with "name" and "arguments".')
    unknown = sorted(set(item) - _CALL_KEYS)
    if unknown:
        raise Unreadable(f'A call has "name" and "arguments", not {unknown[0]!r}.')
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = load(arguments)
    if not isinstance(arguments, dict):
        raise Unreadable('"arguments" must be an object.')
    return ToolCall(item["name"], arguments)


def _answer(value: Any) -> str:
    if isinstance(value, dict | list) or value is None:
        raise Unreadable("A final answer is a text or a number.")
    return value if isinstance(value, str) else json.dumps(value)


def _refuse(name: str) -> NoReturn:
    raise Unreadable(f"{name} is not valid JSON.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise Unreadable("A key occurs twice in one object.")
    return made
