"""JSON schemas of tool arguments: made from type hints, checked strictly. Stdlib only.

A subset of JSON Schema that a tool needs. Objects with properties take no others unless the schema says so,
booleans are no integers, and a keyword that is not understood is refused instead of ignored.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

Schema = Mapping[str, Any]

_words = str.split
KEYWORDS = frozenset(
    _words("""
    type enum const anyOf properties required additionalProperties items minimum maximum minLength maxLength
    minItems maxItems pattern title description default examples
    """)
)
BOUNDS = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems")
MAX_DEPTH, MAX_PATTERN = 16, 400
_PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", None: "null"}
_PLAIN |= {type(None): "null", list: "array", dict: "object"}
TYPES = frozenset(_PLAIN.values())
_ARTICLE = {"integer": "an integer", "array": "an array", "object": "an object", "null": "null"}
_SHOWN = 60


class SchemaError(ValueError):
    """A schema, or a type hint, that a tool cannot have."""


def of_function(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of the arguments of ``function`` from its type hints.

    Literal gives an enum, ``Annotated[..., "text"]`` a description; what has a default is not required.
    Raises SchemaError for a parameter without a hint, or with one that JSON does not know.
    """
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise SchemaError(f"its type hints cannot be read: {error}") from None
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SchemaError(f"parameter {name} must be an ordinary one, without * or /")
        if name not in hints:
            raise SchemaError(f"parameter {name} has no type hint")
        properties[name] = of_hint(hints[name])
        if parameter.default is parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def of_hint(hint: Any) -> dict[str, Any]:
    """Return the schema of one type hint. Raises SchemaError."""
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        notes = [note for note in arguments[1:] if isinstance(note, str)]
        return of_hint(arguments[0]) | ({"description": notes[0]} if notes else {})
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [of_hint(argument) for argument in arguments]}
    if origin is list and arguments:
        return {"type": "array", "items": of_hint(arguments[0])}
    if origin is dict and arguments[:1] == (str,):
        return {"type": "object", "additionalProperties": of_hint(arguments[1])}
    if origin in (list, dict) and not arguments:
        return {"type": _PLAIN[origin]}
    raise SchemaError(f"{hint} is no type of JSON; use str, int, float, bool, list, dict or Literal")


def require_sound(schema: object, where: str = "the schema", depth: int = 0) -> None:
    """Raise SchemaError, and nothing else, unless ``schema`` uses only what :func:`problems` understands."""
    if depth > MAX_DEPTH:
        raise SchemaError("the schema is nested too deeply")
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{where} must be a dict")
    unknown = sorted(set(map(str, schema)) - KEYWORDS)
    if unknown:
        raise SchemaError(f"{where} uses {unknown[0]!r}, which is not understood")
    _require_kinds(schema, where)
    _require_bounds(schema, where)
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping) or not all(isinstance(name, str) for name in properties):
        raise SchemaError(f"{where} has properties that are not a dict")
    required = schema.get("required", ())
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise SchemaError(f"{where} requires what is no list of names")
    missing = sorted(set(required) - set(properties)) if properties else []
    if missing:
        raise SchemaError(f"{where} requires {missing[0]!r}, which is not among its properties")
    for name, inner in properties.items():
        require_sound(inner, f"{where}.{name}", depth + 1)
    for inner in schema.get("anyOf", ()):
        require_sound(inner, where, depth + 1)
    for key in ("items", "additionalProperties"):
        if not isinstance(schema.get(key, True), bool):
            require_sound(schema[key], f"{where}.{key}", depth + 1)


def _require_kinds(schema: Schema, where: str) -> None:
    kinds = schema.get("type", [])
    names = [kinds] if isinstance(kinds, str) else kinds
    known = isinstance(names, list | tuple) and all(isinstance(n, str) and n in TYPES for n in names)
    if not known or (not names and "type" in schema):
        raise SchemaError(f"{where} has the unknown type {kinds!r}")
    for key, what in (("enum", "values"), ("anyOf", "schemas")):
        if key in schema and not (isinstance(schema[key], list | tuple) and schema[key]):
            raise SchemaError(f"{where} has an {key} that is not a list of {what}")


def _require_bounds(schema: Schema, where: str) -> None:
    for key in BOUNDS:
        value = schema.get(key, 0)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or (isinstance(value, float) and not math.isfinite(value)):
            raise SchemaError(f"{where} has a {key} that is not a number")
    pattern = schema.get("pattern", "")
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        raise SchemaError(f"{where} has a pattern that is no text of at most {MAX_PATTERN} characters")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise SchemaError(f"{where} has a pattern that is no regular expression: {error}") from None


def problems(value: object, schema: Schema, where: str = "the value") -> list[str]:
    """Return what is wrong with ``value``, in words that tell what would be right; [] when nothing is."""
    choices = schema.get("anyOf")
    if choices and all(problems(value, choice, where) for choice in choices):
        return [f"{where} must be {_a(schema)}, not {shown(value)}"]
    kinds = schema.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if kinds and not any(_is(value, kind) for kind in kinds):
        return [f"{where} must be {_a(schema)}, not {shown(value)}"]
    allowed = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    if allowed and not any(same(value, one) for one in allowed):
        return [f"{where} must be {_a(schema)}, not {shown(value)}"]
    if isinstance(value, dict):
        return _of_object(value, schema, where)
    if isinstance(value, list):
        return _of_array(value, schema, where)
    return _of_scalar(value, schema, where)


def _of_object(value: dict[str, Any], schema: Schema, where: str) -> list[str]:
    properties: Schema = schema.get("properties", {})
    found = [
        f"{_inside(where, name)} is missing ({wanted(properties.get(name, {}))})"
        for name in schema.get("required", ())
        if name not in value
    ]
    others = schema.get("additionalProperties", not properties)
    for name, inner in value.items():
        if name in properties:
            found += problems(inner, properties[name], _inside(where, name))
        elif others is False:
            known = ", ".join(properties) or "none"
            found.append(f"{_inside(where, name)} is not known (known: {known})")
        elif isinstance(others, Mapping):
            found += problems(inner, others, _inside(where, name))
    return found


def _of_array(value: list[Any], schema: Schema, where: str) -> list[str]:
    found = _bounds(len(value), schema, "Items", f"the length of {where}")
    if isinstance(items := schema.get("items"), Mapping):
        for number, item in enumerate(value):
            found += problems(item, items, f"{where}[{number}]")
    return found


def _of_scalar(value: object, schema: Schema, where: str) -> list[str]:
    if isinstance(value, str):
        found = _bounds(len(value), schema, "Length", f"the length of {where}")
        if "pattern" in schema and re.search(schema["pattern"], value) is None:
            found.append(f"{where} must match {schema['pattern']}, not {shown(value)}")
        return found
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _bounds(value, schema, "imum", where)
    return []


def _bounds(value: float, schema: Schema, suffix: str, what: str) -> list[str]:
    low, high = schema.get(f"min{suffix}"), schema.get(f"max{suffix}")
    if low is not None and value < low:
        return [f"{what} must be at least {low}, not {value}"]
    if high is not None and value > high:
        return [f"{what} must be at most {high}, not {value}"]
    return []


def _inside(where: str, name: str) -> str:
    return f"argument {name!r}" if not where else f"{where}.{name}"


def _is(value: object, kind: str) -> bool:
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    return type(value) in _PLAIN and _PLAIN[type(value)] == kind


def same(one: object, other: object) -> bool:
    """Equality of JSON values: True is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def wanted(schema: Schema) -> str:
    """Say what ``schema`` asks for."""
    values: Sequence[Any] = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    if values:
        return ("one of " if len(values) > 1 else "") + ", ".join(map(shown, values))
    if "anyOf" in schema:
        return " or ".join(map(wanted, schema["anyOf"]))
    kinds = schema.get("type", "any value")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def _a(schema: Schema) -> str:
    """What is wanted, in a sentence."""
    words = wanted(schema)
    return " or ".join(_ARTICLE.get(w, f"a {w}" if w in TYPES else w) for w in words.split(" or "))


def shown(value: object) -> str:
    """The value as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
