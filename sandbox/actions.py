"""Actions to try without a model: suggested by an observation or a program's text, and nonsense. Pure."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sandbox.tool_calls import MAX_CALLS

NONSENSE = "banana"
GARBAGE = (NONSENSE, "", "-1", "999999999", "\\boxed{1}", "{}")
GARBAGE_CALLS = (
    NONSENSE,
    "",
    "{",
    "[]",
    '{"name": "no_such_tool", "arguments": {}}',
    '{"name": 1, "arguments": [NaN]}',
    "<tool_call>{}",
    '{"answer": null}',
    '[{"answer": "x"}, 7]',
)
# Long, and with something of everything that a careless test of an action may look for.
RAMBLE = "Banana? 7 + 3 = 10, yes! \u00e9\u4e2d: (a) [b] {c} <d> \"e\" 'f'; g/h_i-j @k #l $m %n &o *p\n" * 24
# Short and well-formed: a test for the form of an essay, a proof or a plan takes it for one.
ESSAY = (
    "First, step 1: I think it is so because of this, for example. Second, step 2: I would move on, please. "
    "Therefore, the final answer is yes. Thank you."
)
_BABBLE = ("banana", "umbrella soup", "Quietly 7", "the teapot sings", "zebra", "a wet, blue 12th", "kettle!")

_NUMBER = re.compile(r"-?\d+")
# bounded, because a program may fill its observation with digits: int() refuses thousands of them, and a
# search that begins at each of them blocks the engine
_RANGE = re.compile(r"(?<!\d)(-?\d{1,18})\s*(?:\.\.+|\u2013|-|to|and)\s*(-?\d{1,18})(?!\d)")
_WORD = re.compile(r"[^\W\d_]{1,24}")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_QUOTED = re.compile(r"(?<!\w)['\"`]([^'\"`\n]{1,32})['\"`](?!\w)")
_COMPARED = re.compile(
    r"(?:==|!=|\bin)\s{0,8}[(\[{]?\s{0,8}(?:'([^'\\\n]{1,32})'|\"([^\"\\\n]{1,32})\"|(-?\d{1,12})\b)"
)
_LITERAL = re.compile(r"'([^'\\\n]{1,32})'|\"([^\"\\\n]{1,32})\"")
# Places of a text that show the form of an action: quotes, braces, or behind a word such as "give".
_FORMATS = (
    re.compile(r"`([^`\n]{1,60})`"),
    re.compile(r"\"([^\"\n]{2,60})\""),
    re.compile(r"(?<!\w)'([^'\n]{2,60})'(?!\w)"),
    re.compile(r"(\{[^{}\n]{2,80}\})"),
    re.compile(
        r"(?i)\b(?:actions?|answer|commands?|enter|format|give|move|name|play|reply|respond|say|send|type|use|write)"
        r"(?:\s+(?:with|as|is|in|like|a|an|the|form|format|your))*\s*:?\s+([^.;!?\n]{1,40})"
    ),
)
# A place to fill in: <word>, [word], a row of dots or of underscores, or a usual name of a variable.
_BLANK = re.compile(
    r"<[^<>\n]{1,24}>|\[[^\[\]\n]{1,24}\]|\.{3,}|\u2026|_{2,}|\b(?:[A-Z]{1,2}|[a-hj-z]|d[xy]|row|col|column|number|num"
    r"|value|amount|count|index|item|word|name|code|direction|n\d?|x\d?|y\d?)\b"
)
_MAX_LITERALS, _MAX_FORMATS = 32, 4
_MAX_SPAN, _MAX_EACH, _MAX_WORDS, _MAX_EXAMPLES, _MAX_ACTIONS, _MAX_RANGES = 40, 12, 24, 8, 64, 16
_VARIANTS = 6


def plausible(observation: str) -> tuple[str, ...]:
    """Return at most 64 actions that the text suggests.

    They are its examples, ranges, numbers and words, then small numbers.
    """
    found = [example.strip() for example in _BOXED.findall(observation)][:_MAX_EXAMPLES]
    for low, high in ranges(observation):
        if high - low <= _MAX_SPAN:
            found += map(str, range(low, high + 1))
        else:
            # of a wide range its quarters: hidden numbers lie on both sides of them
            found += [str(low + (high - low) * quarter // 4) for quarter in (2, 1, 3, 0, 4)]
    found += [number for number in _NUMBER.findall(observation) if len(number) <= 6][:_MAX_EACH]
    found += [quoted for quoted in _QUOTED.findall(observation) if quoted.strip()][:_MAX_EXAMPLES]
    found += list(dict.fromkeys(_WORD.findall(observation)))[:_MAX_WORDS]
    found += map(str, range(10))
    return tuple(dict.fromkeys(found))[:_MAX_ACTIONS]


def ranges(observation: str) -> list[tuple[int, int]]:
    """Return the ranges of numbers that the text names, both ends included."""
    matches = itertools.islice(_RANGE.finditer(observation), _MAX_RANGES)
    found = [(int(match[1]), int(match[2])) for match in matches]
    return [(low, high) for low, high in found if low < high]


def literals(source: str) -> tuple[str, ...]:
    """Return at most 32 short texts and numbers that ``source`` holds, those that it compares with first.

    One of them may be a word that always wins.
    """
    found = [next(filter(None, groups)) for groups in _COMPARED.findall(source) if any(groups)]
    found += [next(filter(None, groups)) for groups in _LITERAL.findall(source) if any(groups)]
    return tuple(dict.fromkeys(found))[:_MAX_LITERALS]


def formats(observation: str) -> tuple[str, ...]:
    """Return at most four actions in the formats that the text quotes, with numbers in the blanks.

    ``Answer SUM: n`` gives ``SUM: 1``, ``give row,column`` gives ``1,2``. Those without a blank are left out.
    """
    found: dict[str, None] = {}
    for pattern in _FORMATS:
        for match in itertools.islice(pattern.finditer(observation), _MAX_FORMATS):
            numbers = itertools.count(1)
            filled = _BLANK.sub(lambda _: str(next(numbers)), match[1].strip())  # noqa: B023
            if filled != match[1].strip():
                found[filled] = None
    return tuple(found)[:_MAX_FORMATS]


def at_once(actions: Sequence[str], observation: str) -> str:
    """Return all that the text suggests as one action."""
    calls = [action for action in actions if action.startswith('{"name"')]
    return f"[{', '.join(calls[:MAX_CALLS])}]" if calls else " ".join((*actions, observation))


def tool_actions(tools: Sequence[Mapping[str, Any]], observation: str) -> tuple[str, ...]:
    """Return at most 64 calls of ``tools`` with arguments that their schemas and the text suggest."""
    words = list(plausible(observation))
    found = []
    for variant in range(_VARIANTS):
        for tool in tools:
            parameters = tool["function"]["parameters"]
            arguments = {
                name: _value(inner, words, variant + place)
                for place, (name, inner) in enumerate(parameters.get("properties", {}).items())
            }
            found.append(json.dumps({"name": tool["function"]["name"], "arguments": arguments}))
        found.append(json.dumps({("answer", "reply")[variant % 2]: words[variant % len(words)]}))
    return tuple(dict.fromkeys(found))[:_MAX_ACTIONS]


def _value(schema: Mapping[str, Any], words: Sequence[str], variant: int) -> Any:
    """Return some value that ``schema`` allows, another for another ``variant``."""
    if choices := schema.get("enum", ()):
        return choices[variant % len(choices)]
    if choices := schema.get("anyOf", ()):
        return _value(choices[variant % len(choices)], words, variant)
    kinds = schema.get("type", "string")
    kind = kinds if isinstance(kinds, str) else kinds[variant % len(kinds)]
    numbers = [int(word) for word in words if _NUMBER.fullmatch(word)] or [0]
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    number = min(high, max(low, numbers[variant % len(numbers)]))
    texts = [word for word in words if not _NUMBER.fullmatch(word)] or words
    values: dict[str, Any] = {
        "integer": int(number),
        "number": number,
        "boolean": variant % 2 == 0,
        "null": None,
        "array": [_value(schema.get("items") or {}, words, variant)] if kind == "array" else [],
        "object": {
            name: _value(inner, words, variant) for name, inner in schema.get("properties", {}).items()
        },
    }
    return values.get(kind, texts[variant % len(texts)])


def boxed(text: str) -> list[str]:
    """Return the contents of the boxed groups of a text."""
    return [group.strip() for group in _BOXED.findall(text)]


def constant(_: Sequence[str], turns: int, action: str) -> Iterator[str]:
    """Yield always the same action, whatever is plausible."""
    return iter([action] * turns)


def sweep(actions: Sequence[str], turns: int, start: int = 0) -> Iterator[str]:
    """Yield the actions in order, beginning with number ``start``, over and over."""
    return (actions[(start + i) % len(actions)] for i in range(turns))


def guess(actions: Sequence[str], turns: int, seed: int) -> Iterator[str]:
    """Yield actions drawn at random; programs draw from the same seeds, so it is not the seed alone."""
    source = random.Random(f"{seed} at random")
    return (source.choice(actions) for _ in range(turns))


def babble(_: Sequence[str], turns: int) -> Iterator[str]:
    """Yield a new text that means nothing in each turn, whatever is plausible."""
    return (_BABBLE[i] if i < len(_BABBLE) else f"{_BABBLE[i % len(_BABBLE)]} {i}" for i in range(turns))
