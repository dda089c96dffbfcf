"""Tool calls in a model's own format: which one its template writes, and the calls in a reply. Pure.

The readers are our own: vLLM's parsers import torch, and pass malformed calls on as plain text. Formats with
one frame share a reader: ``tagged`` reads ``<tool_call>`` blocks of JSON (Hermes, Qwen3), of
``<function=...>`` (Qwen3-Coder) and of ``<arg_key>`` (GLM); mistral, deepseek and harmony (gpt-oss) are JSON
behind a head that names the tool.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sandbox import tool_calls
from sandbox.tool_calls import Unreadable, load

Tools = Sequence[Mapping[str, Any]]
Call = dict[str, Any]

PROBE = "probe_tool"
_ANSWER = re.compile(r'<answer>.*?</answer>|^\s*\{\s*"answer"\s*:.*\}\s*$', re.DOTALL)
_LIST = re.compile(r"\[\s*(?=[A-Za-z_][\w.]*\()")
_SPELLED = re.compile(r"\s*([^<>\s{]+)")
_WORDS = {"true": True, "false": False, "null": None}
_DEEPSEEK = {
    name: f"<\uff5ctool▁{name}\uff5c>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
}
_WRITTEN = {
    "tagged": re.compile(rf"<tool_call>\s*(\{{.*|<function=)?.*{PROBE}.*</tool_call>", re.DOTALL),
    "mistral": re.compile(rf"\[TOOL_CALLS\].*{PROBE}.*?\}}\]?", re.DOTALL),
    "pythonic": re.compile(rf"\[{PROBE}\(.*?\)\]"),
    "json": re.compile(rf'\{{"name": "{PROBE}".*?\}}\}}'),
    "deepseek": re.compile(rf"{_DEEPSEEK['calls▁begin']}.*{PROBE}.*{_DEEPSEEK['calls▁end']}", re.DOTALL),
    "harmony": re.compile(rf"to=functions\.{PROBE}<\|channel\|>.*<\|call\|>"),
}
_OPEN, _SHUT = "<tool_call>", "</tool_call>"


class _Heads(NamedTuple):
    """A format with a head before the arguments: no call is without ``mark``, and ``end`` closes it.

    In ``head`` the group is the tool's name; without one the JSON is a whole call, or a list of calls.
    """

    mark: str
    head: re.Pattern[str]
    end: re.Pattern[str]


_HEADS = {
    "mistral": _Heads(
        "[TOOL_CALLS]",
        re.compile(r"\[TOOL_CALLS\]\s*(?:([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?)?\s*(?=[\[{])"),
        re.compile(r"\s*(?=\[TOOL_CALLS\]|\Z)"),
    ),
    "deepseek": _Heads(
        _DEEPSEEK["call▁begin"],
        re.compile(
            rf"{_DEEPSEEK['call▁begin']}\s*(?:function{_DEEPSEEK['sep']})?([^\s<{{]+)\s*(?:{_DEEPSEEK['sep']}|```json)\s*"
        ),
        re.compile(rf"\s*(?:```\s*)?{_DEEPSEEK['call▁end']}"),
    ),
    "harmony": _Heads(
        "<|call|>",
        re.compile(r"to=functions\.([\w.-]+)(?:[^<=]|<\|(?:channel|constrain)\|>){,80}<\|message\|>\s*"),
        re.compile(r"\s*(?:<\|call\|>|\Z)"),
    ),
}


class CallFormat(NamedTuple):
    """A reader, and an example of the form that it reads."""

    name: str
    example: str

    @property
    def in_channels(self) -> bool:
        """Return whether calls stand beside the visible reply, so that templates take them apart from it."""
        return self.name == "harmony"

    def action(self, said: str, tools: Tools, reply: str = "") -> str:
        """Return a visible reply, part of the whole ``reply``, as an action of a tool environment.

        It is a list of calls, the final answer, what is wrong with the calls, or the text to the user.
        """
        try:
            calls = self.calls(said, tools, reply)
        except Unreadable as error:
            return json.dumps({"unreadable": str(error)})
        if calls:
            return json.dumps(calls, ensure_ascii=False)
        return said.strip() if _ANSWER.search(said) else json.dumps({"reply": said}, ensure_ascii=False)

    def calls(self, said: str, tools: Tools, reply: str = "") -> list[Call]:
        """Return the calls in a visible reply, or in the whole ``reply`` where they stand beside it.

        Raises Unreadable, which shows the right form.
        """
        text, heads = reply if self.in_channels else said, _HEADS.get(self.name)
        try:
            return _headed(text, heads) if heads else _READERS[self.name](text, tools)
        except Unreadable as error:
            raise Unreadable(f"{error} A call looks like this: {self.example}") from None


TAGGED = CallFormat("tagged", f'{_OPEN}{{"name": "...", "arguments": {{...}}}}{_SHUT}')


def recognise(written: str) -> CallFormat | None:
    """Return the format of ``written``, a call of the tool PROBE as a chat template writes it."""
    for name, form in _WRITTEN.items():
        if found := form.search(written):
            return CallFormat(name, found[0].replace(PROBE, "NAME"))
    return None


def listing(tools: Tools, form: CallFormat = TAGGED) -> str:
    """Return the tools as text, for templates that show none."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return "\n".join(["These tools are there:", *lines, f"A call looks like this: {form.example}"])


def _tagged(text: str, tools: Tools) -> list[Call]:
    calls, at = [], text.find(_OPEN)
    if at < 0 and re.match(r'\s*(```\w*\s*)?\{\s*"name"', text):
        raise Unreadable("A call is not marked as one.")
    while at >= 0:
        at += len(_OPEN)
        if text[at:].lstrip()[:1] in ("{", "["):
            made, at = _json(text, at)
        else:
            end = text.find(_SHUT, at)
            made, at = [_spelled(text[at : end if end >= 0 else len(text)], tools)], end
        if at < 0 or not text[at:].lstrip().startswith(_SHUT):
            raise Unreadable(f"A {_OPEN} is not closed by {_SHUT}.")
        calls += made
        at = text.find(_OPEN, at)
    return calls


def _spelled(block: str, tools: Tools) -> Call:
    """Read a block that names each argument in a mark of its own. Time grows with its length, not faster."""
    text = block.strip()
    if text.startswith("<function="):
        name, at = _between(text, 0, "<function=", ">")
        inside, end = _between(text, at - 1, ">", "</function>")
        if text[end:]:
            raise Unreadable("Something stands behind the call.")
        found = [*_parameters(inside)]
    elif named := _SPELLED.match(text):
        name, found = named[1], [*_pairs(text[named.end() :])]
    else:
        raise Unreadable("This block holds no call.")
    name = name.strip()
    known: Mapping[str, Any] = next(
        (one["function"]["parameters"] for one in tools if one["function"]["name"] == name), {}
    )
    schemas = known.get("properties", {})
    arguments = _once([(key, _value(value, schemas.get(key, {}))) for key, value in found])
    return {"name": name, "arguments": arguments}


def _parameters(text: str) -> Iterator[tuple[str, str]]:
    """Yield the arguments of ``<parameter=NAME>VALUE</parameter>``."""
    at = _past_spaces(text, 0)
    while at < len(text):
        name, at = _between(text, at, "<parameter=", ">")
        value, at = _between(text, at - 1, ">", "</parameter>")
        yield name.strip(), value.removeprefix("\n").removesuffix("\n")
        at = _past_spaces(text, at)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the arguments of ``<arg_key>NAME</arg_key><arg_value>VALUE</arg_value>``."""
    at = _past_spaces(text, 0)
    while at < len(text):
        key, at = _between(text, at, "<arg_key>", "</arg_key>")
        value, at = _between(text, _past_spaces(text, at), "<arg_value>", "</arg_value>")
        yield key.strip(), value
        at = _past_spaces(text, at)


def _between(text: str, at: int, opened: str, shut: str) -> tuple[str, int]:
    """Return what stands between two marks, the first at ``at``, and the place behind the second."""
    if not text.startswith(opened, at):
        raise Unreadable("Something stands between the arguments.")
    end = text.find(shut, at + len(opened))
    if end < 0:
        raise Unreadable(f"{opened} is not closed by {shut}.")
    return text[at + len(opened) : end], end + len(shut)


def _past_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _once(found: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return arguments by name. Raises Unreadable when one is given twice."""
    if len(dict(found)) < len(found):
        raise Unreadable("An argument is given twice.")
    return dict(found)


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return an argument that is written as text: text where its schema wants that, else JSON."""
    if schema.get("type") == "string" or any(isinstance(one, str) for one in schema.get("enum", ())):
        return text
    try:
        return load({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip()))
    except Unreadable:
        return text


def _bare(text: str, tools: Tools) -> list[Call]:
    text = text.strip().removeprefix("<|python_tag|>").lstrip()
    calls: list[Call] = []
    while text.startswith("{") and not re.match(r'\{\s*"answer"', text):
        made, at = _json(text, 0)
        calls, text = calls + made, text[at:].lstrip(" \n;")
    if calls and text:
        raise Unreadable("Something stands behind the calls.")
    return calls


def _headed(text: str, form: _Heads) -> list[Call]:
    calls: list[Call] = []
    at = 0
    while True:
        head = form.head.search(text, at)
        if form.mark in text[at : head.start() if head else len(text)]:
            raise Unreadable(f"There is a {form.mark} without the head of a call.")
        if head is None:
            return calls
        if head[1]:
            arguments, at = _decoded(text, head.end())
            calls.append(tool_calls.call({"name": head[1], "arguments": arguments})._asdict())
        else:
            made, at = _json(text, head.end())
            calls += made
        end = form.end.match(text, at)
        if end is None:
            raise Unreadable("A call is not closed, or something stands behind its arguments.")
        at = end.end()


def _pythonic(text: str, tools: Tools) -> list[Call]:
    start = _LIST.search(text)
    if start is None:
        return []
    try:
        listed = re.sub(r"\s*<\|\w+\|>\s*$", "", text[start.start() :])
        tree = ast.parse(listed.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not all(_is_call(one) for one in tree.elts):
            raise Unreadable("This is not a list of calls.")
        return [
            {
                "name": ast.unparse(one.func),
                "arguments": _once([(str(word.arg), _literal(word.value)) for word in one.keywords]),
            }
            for one in tree.elts
            if isinstance(one, ast.Call)
        ]
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"These are not calls in Python's form: {str(error)[:80]}.") from None


def _is_call(node: ast.expr) -> bool:
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) and not node.args
    return named and all(word.arg for word in node.keywords)  # type: ignore[attr-defined]


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal that JSON knows, true, false and null among them."""
    match node:
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {
                str(_literal(key)): _literal(value) for key, value in zip(keys, values, strict=True) if key
            }
        case _:
            return load(json.dumps(ast.literal_eval(node)))


def _json(text: str, at: int) -> tuple[list[Call], int]:
    """Return the call, or the list of calls, in the JSON at ``at``, and where it ends."""
    found, end = _decoded(text, at)
    items = found if isinstance(found, list) else [found]
    if not items:
        raise Unreadable("The list of calls is empty.")
    return [tool_calls.call(item)._asdict() for item in items], end


def _decoded(text: str, at: int) -> tuple[Any, int]:
    at += len(text[at:]) - len(text[at:].lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, at)
    except RecursionError:
        raise Unreadable("The JSON is nested too deeply.") from None
    except ValueError as error:
        raise Unreadable(f"This is not valid JSON: {error}.") from None
    return load(text[at:end]), end


_READERS: dict[str, Callable[[str, Tools], list[Call]]] = {
    "tagged": _tagged,
    "json": _bare,
    "pythonic": _pythonic,
}
