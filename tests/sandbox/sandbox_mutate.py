"""Seeded mutations of programs and of reply frames. Pure: the same generator gives the same result."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

_TOKEN = re.compile(r"\s+|\w+|[^\w\s]+")
_LISTED = r"""
while True: pass | raise SystemExit | raise MemoryError | return None | return 7 | import os | import ctypes
self.__dict__.clear() | self.max_turns = -1 | self.max_turns = 10 ** 400 | del self | print('x' * 10 ** 6)
x = [0] * 10 ** 9 | x = 'y' * 10 ** 9 | self.step(a) | self.step(action) | self.get_tools = lambda: [{}]
self.solution = lambda: [[]] * 9 | self.solution = lambda: {1: 2} | self.reset = None | self.step = self.reset
random.seed() | yield 1 | assert False | return self | self.criteria_met = lambda: [1]
type(self).step = type(self).reset | return '1 to ' + '9' * 5000 | return '9' * 60000, {} | return ''
return '\ud800\0\x1b' * 99 | return 'x', 1e308, True, False, {} | return 'x', -10, True, False, {1: {2: self}}
global random | import queue; queue.Queue().get() | return '\\boxed{' * 9000 | return 'the answer is 1'
import gc; gc.collect() | self.t = None | self.t = float('nan') | self.__class__ = int
exit() | self.intro = '9' * 5000
"""
_STATEMENTS = [one for line in _LISTED.strip().splitlines() for one in line.split(" | ")]
_CONSTANTS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 10**9, 2**63, -(2**70), 10**30, 0.5, -1e308, 1e308, float("inf"), True, False, None),
    *("", "x", "\0", "\ud800", "9" * 5000, "\\boxed{3}", "<tool_call>" * 99, "1..9", "0 to 99999999999"),
    *(
        b"x",
        "a" * 9000,
        "\u0661\u0662",
        "{'answer': 1}",
        '{"answer": "x"}',
        "the secret is 4",
        "\n" * 500,
        ...,
    ),
)
_TEXTS = ('"""', *"\0\ud800\u202e\ufeff'\"\\\t\r\x0c([{}:#;")
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Pow, ast.Mod, ast.FloorDiv, ast.LShift)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.Gt, ast.Is, ast.In, ast.NotIn)


def program(random: Random, seeds: Sequence[str]) -> str:
    """A program made of one of ``seeds`` by one to three mutations."""
    source = random.choice(seeds)
    for _ in range(random.choice((1, 1, 2, 3))):
        source = random.choice(_PROGRAMS)(random, source, seeds)
    return source[: 1 << 16]


def _text(random: Random, source: str, _: Sequence[str]) -> str:
    place = random.randrange(len(source) + 1)
    return source[:place] + random.choice(_TEXTS) * random.choice((1, 1, 2, 300)) + source[place:]


def _insert(random: Random, source: str, _: Sequence[str]) -> str:
    """Put a statement where one may stand, with the indentation of its neighbour."""
    lines = source.splitlines(keepends=True) or ["\n"]
    place = random.randrange(len(lines))
    indent = len(lines[place]) - len(lines[place].lstrip())
    lines.insert(place, " " * indent + random.choice(_STATEMENTS) + "\n")
    return "".join(lines)


def _tokens(random: Random, source: str, seeds: Sequence[str]) -> str:
    tokens = _TOKEN.findall(source) or [""]
    others = _TOKEN.findall(random.choice(seeds)) or [""]
    for _ in range(random.randint(1, 3)):
        place = random.randrange(len(tokens))
        tokens[place] = random.choice((random.choice(tokens), random.choice(others), "", tokens[place] * 2))
    return "".join(tokens)


def _tree(random: Random, source: str, seeds: Sequence[str]) -> str:
    """Change one place of the syntax tree; what does not parse is changed by its tokens."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _tokens(random, source, seeds)
    nodes = [node for node in ast.walk(tree) if type(node) in _CHANGES or hasattr(node, "body")]
    if not nodes:
        return _tokens(random, source, seeds)
    node = random.choice(nodes)
    _CHANGES.get(type(node), _change_body)(random, node, nodes)
    try:
        return ast.unparse(ast.fix_missing_locations(tree))
    except (ValueError, RecursionError, TypeError, AttributeError):
        return _tokens(random, source, seeds)


def _change_constant(random: Random, node: Any, _: list[Any]) -> None:
    node.value = random.choice(_CONSTANTS)


def _change_name(random: Random, node: Any, nodes: list[Any]) -> None:
    node.id = random.choice([other.id for other in nodes if isinstance(other, ast.Name)])


def _change_operator(random: Random, node: Any, _: list[Any]) -> None:
    node.op = random.choice(_OPERATORS)()
    if random.random() < 0.3:
        node.left, node.right = node.right, node.left


def _change_comparison(random: Random, node: Any, _: list[Any]) -> None:
    node.ops = [random.choice(_COMPARISONS)() for _ in node.ops]


def _change_tuple(random: Random, node: Any, _: list[Any]) -> None:
    if isinstance(node.ctx, ast.Load):
        random.shuffle(node.elts)
        node.elts = node.elts[: random.randint(0, len(node.elts))] * random.randint(1, 2)


def _change_call(random: Random, node: Any, _: list[Any]) -> None:
    node.args = random.choice((node.args[1:], node.args * 2, node.args[::-1]))


def _change_body(random: Random, node: Any, nodes: list[Any]) -> None:
    body = node.body
    if not isinstance(body, list) or not body:
        return
    place = random.randrange(len(body))
    kind = random.randrange(4)
    if kind == 0 and len(body) > 1:
        del body[place]
    elif kind == 1:
        body.insert(place, copy.deepcopy(random.choice(body)))
    elif kind == 2:
        body[place] = ast.While(test=ast.Constant(value=True), body=[body[place]], orelse=[])
    else:
        others = [o.body for o in nodes if isinstance(getattr(o, "body", None), list) and o.body]
        body[place] = copy.deepcopy(random.choice(random.choice(others)))


_CHANGES: dict[type, Callable[[Random, Any, list[Any]], None]] = {
    ast.Constant: _change_constant,
    ast.Name: _change_name,
    ast.BinOp: _change_operator,
    ast.Compare: _change_comparison,
    ast.Tuple: _change_tuple,
    ast.Call: _change_call,
}
_PROGRAMS: tuple[Callable[[Random, str, Sequence[str]], str], ...] = (
    *(_text, _tokens),
    *(_insert, _tree) * 3,
)


_VALUES = (
    *("null", "true", "false", "0", "1", "-1", "0.5", "10", "10.000001", "1e999", "-0.0", "NaN", "Infinity"),
    *("[]", "{}", "[[]]", "[1,2]", '""', '"x"', '"\\ud800"', '"\\u0000"', '{"k":1}', '{"k":[1]}'),
    *('["E","m","t","step"]', '["E","m","t"]', '["MemoryError","","",""]', "9007199254740993"),
    *('{"cls":"E","turns":3,"calls":[]}', '{"cls":"E","turns":-1,"calls":["step"]}'),
    *("9" * 30, "9" * 5000, '"' + "y" * 300 + '"', "{" * 400, "[" * 400),
)
_KEYS = ("i", "o", "r", "te", "tr", "p", "err", "out", "m", "x", "", "i\\u0000", "__class__")


def frame(random: Random, number: int) -> bytes:
    """A frame that begins as an answer to request ``number``, mutated in fields, bytes, or length."""
    body = _answer(random, number)
    for _ in range(random.choice((0, 0, 0, 0, 1, 3))):
        body = _bend(random, body)
    length = len(body)
    if random.random() < 0.1:
        length = random.choice(
            (0, 1, length - 1, length + 1, length * 2, 1 << 18, (1 << 18) + 1, 1 << 31, (1 << 32) - 1)
        )
    data = (max(0, length) & 0xFFFFFFFF).to_bytes(4, "little") + body
    if random.random() < 0.1:
        data += random.choice((b"\0", b"\0" * 4, data, b"{", data[:5]))
    if random.random() < 0.05:
        data = data[: random.randrange(len(data))]
    return data


def _answer(random: Random, number: int) -> bytes:
    observation = json.dumps("seen " + random.choice(("", "it", "\u00e9" * 40)))
    reward = random.choice(("0.0", "1.0", "-3.5", "1"))
    fields = {"i": str(number), "o": observation, "r": reward, "te": "false", "tr": "false", "p": "[1,2]"}
    for _ in range(random.choice((0, 0, 1, 2))):
        fields[random.choice(_KEYS)] = random.choice(_VALUES)
    for name in random.sample(sorted(fields), random.choice((0, 0, 0, 1, 2))):
        fields.pop(name)
    text = ",".join(f'"{name}":{value}' for name, value in fields.items())
    return ("{" + text + "}").encode("utf-8", "surrogatepass")


def _bend(random: Random, body: bytes) -> bytes:
    place = random.randrange(len(body) + 1)
    kind = random.randrange(5)
    if kind == 0:
        return body[:place] + bytes([random.randrange(256)]) + body[place + 1 :]
    if kind == 1:
        return body[:place] + body[place + random.randint(1, 8) :]
    if kind == 2:
        return body[:place] + random.choice(_VALUES).encode() + body[place:]
    if kind == 3:
        return body[:place] + body[max(0, place - 12) : place] + body[place:]
    return random.choice(
        (b" " + body, body + b" ", b"\xef\xbb\xbf" + body, body.replace(b":", b": "), body[::-1])
    )
