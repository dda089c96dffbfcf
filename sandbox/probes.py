"""Playing a program without a model: transcripts, plausible actions, policies that do not look."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sandbox.errors import EnvError
from sandbox.frames import StepResult
from sandbox.tool_calls import MAX_CALLS

if TYPE_CHECKING:
    from sandbox.instance import Instance

# What int(), indexing and look-ups raise on text that is not an action.
INVALID_ACTION = frozenset(("ValueError", "TypeError", "IndexError", "KeyError"))
# so does reading it as JSON, as a decimal or as bytes
INVALID_ACTION |= frozenset(
    ("JSONDecodeError", "InvalidOperation", "UnicodeEncodeError", "UnicodeDecodeError")
)
NONSENSE = "banana"
GARBAGE = (NONSENSE, "", "-1", "999999999", "\\boxed{1}", "{}")
# Long, and with something of everything that a careless test of an action may look for.
RAMBLE = "Banana? 7 + 3 = 10, yes! \u00e9\u4e2d: (a) [b] {c} <d> \"e\" 'f'; g/h_i-j @k #l $m %n &o *p\n" * 24
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

WIN = 0.5

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
_MAX_LITERALS = 32
_MAX_SPAN, _MAX_EACH, _MAX_WORDS, _MAX_EXAMPLES, _MAX_ACTIONS, _MAX_RANGES = 40, 12, 24, 8, 64, 16
_VARIANTS = 6


class Transcript(msgspec.Struct, frozen=True):
    """What happened from a first observation on.

    ``error`` is the exception that ended it, if one did, with its type and the phase it came from
    (``contract`` when the program's answer was at fault).
    """

    first: str
    actions: tuple[str, ...]
    steps: tuple[StepResult, ...]
    error: str = ""
    error_type: str = ""
    phase: str = ""

    @property
    def ended(self) -> bool:
        """Whether the program itself ended the episode."""
        return bool(self.steps) and self.steps[-1].done

    @property
    def returned(self) -> float:
        """What the episode pays: the last reward, clipped to [0, 1], if the program itself terminated it."""
        if not self.steps or self.error or not self.steps[-1].terminated:
            return 0.0
        return min(1.0, max(0.0, self.steps[-1].reward))

    @property
    def won(self) -> bool:
        """Whether the episode pays at least half; a consolation for a wrong answer is no win."""
        return self.returned >= WIN

    def fingerprint(self) -> bytes:
        """Bytes that are equal for equal transcripts."""
        return msgspec.json.encode(self)


async def play(instance: Instance, first: str, actions: Iterator[str]) -> Transcript:
    """Step through ``actions`` until the episode ends, the program raises, or they run out.

    Raises the terminal errors of the package.
    """
    taken: list[str] = []
    steps: list[StepResult] = []
    for action in actions:
        taken.append(action)
        try:
            steps.append(await instance.step(action))
        except EnvError as error:
            return Transcript(first, tuple(taken), tuple(steps), str(error), error.type, error.phase)
        if steps[-1].done:
            break
    return Transcript(first, tuple(taken), tuple(steps))


def plausible(observation: str) -> tuple[str, ...]:
    """Return at most 64 actions that the text suggests: its examples, ranges, numbers and words, then small
    numbers.
    """
    found = [example.strip() for example in _BOXED.findall(observation)][:_MAX_EXAMPLES]
    for match in itertools.islice(_RANGE.finditer(observation), _MAX_RANGES):
        low, high = int(match[1]), int(match[2])
        if 0 < high - low <= _MAX_SPAN:
            found += map(str, range(low, high + 1))
        elif high > low:
            # of a wide range its quarters: hidden numbers lie on both sides of them
            found += [str(low + (high - low) * quarter // 4) for quarter in (2, 1, 3, 0, 4)]
    found += [number for number in _NUMBER.findall(observation) if len(number) <= 6][:_MAX_EACH]
    found += [quoted for quoted in _QUOTED.findall(observation) if quoted.strip()][:_MAX_EXAMPLES]
    found += list(dict.fromkeys(_WORD.findall(observation)))[:_MAX_WORDS]
    found += map(str, range(10))
    return tuple(dict.fromkeys(found))[:_MAX_ACTIONS]


def literals(source: str) -> tuple[str, ...]:
    """Return at most 32 short texts and numbers that ``source`` holds, what it compares with first: one of
    them may be a word that always wins.
    """
    found = [next(filter(None, groups)) for groups in _COMPARED.findall(source) if any(groups)]
    found += [next(filter(None, groups)) for groups in _LITERAL.findall(source) if any(groups)]
    return tuple(dict.fromkeys(found))[:_MAX_LITERALS]


def at_once(actions: Sequence[str], observation: str) -> str:
    """All that the text suggests in one action."""
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
        found.append(json.dumps({"answer": words[variant % len(words)]}))
    return tuple(dict.fromkeys(found))[:_MAX_ACTIONS]


def _value(schema: Mapping[str, Any], words: Sequence[str], variant: int) -> Any:
    """Some value that ``schema`` allows, another for another ``variant``."""
    if choices := [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]:
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


def solution_actions(value: object) -> list[str]:
    """Return the actions that ``solution()`` means: a list's items, the boxed groups of a text, or the text.

    Raises EnvError when there are none.
    """
    if isinstance(value, list):
        actions = [inner(str(item)) for item in value]
    else:
        text = "" if value is None else str(value)
        actions = [group.strip() for group in _BOXED.findall(text)] or [text.strip()]
    if not any(actions):
        raise EnvError("ContractError", "it returned no action", phase="call")
    return actions


def inner(text: str) -> str:
    """The content of the last boxed group, or the text itself."""
    groups = _BOXED.findall(text)
    return (groups[-1] if groups else text).strip()


def constant(_: Sequence[str], turns: int, action: str) -> Iterator[str]:
    """Always the same action, whatever is plausible."""
    return iter([action] * turns)


def sweep(actions: Sequence[str], turns: int, start: int = 0) -> Iterator[str]:
    """The actions in order, beginning with number ``start``, over and over."""
    return (actions[(start + i) % len(actions)] for i in range(turns))


def guess(actions: Sequence[str], turns: int, seed: int) -> Iterator[str]:
    """Actions drawn at random, without looking at what comes back."""
    source = random.Random(seed)
    return (source.choice(actions) for _ in range(turns))
