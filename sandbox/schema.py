"""JSON schemas of tool arguments: made from type hints, checked strictly. Stdlib only.

The part of JSON Schema that a tool needs. Objects with properties take no others unless the schema allows it,
booleans are not integers, and an unknown keyword is refused instead of ignored.
"""

from __future__ import annotations

import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

Schema = Mapping[str, Any]

_words = str.split
KEYWORDS = frozenset(
    _words("""
    type enum anyOf properties required additionalProperties items minimum maximum title description default
    examples
    """)
)
MAX_DEPTH = 16
_PLAIN: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", None: "null"}
_PLAIN |= {type(None): "null", list: "array", dict: "object"}
TYPES = frozenset(_PLAIN.values())
_ARTICLE = {"integer": "an integer", "array": "an array", "object": "an object", "null": "null"}
_SHOWN = 60


class SchemaError(ValueError):
    """A schema, or a type hint, that a tool cannot have."""


def of_function(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of the arguments of ``function`` from its type hints.

    Literal gives an enum, ``Annotated[..., "text"]`` a description; a parameter with a default is optional.
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
    if unknown := sorted(set(map(str, schema)) - KEYWORDS):
        raise SchemaError(f"{where} uses {unknown[0]!r}, which is not understood")
    kinds = schema.get("type", "string")
    names = [kinds] if isinstance(kinds, str) else kinds
    if not _is_list(names) or not names or not all(isinstance(n, str) and n in TYPES for n in names):
        raise SchemaError(f"{where} has the unknown type {kinds!r}")
    for key in ("enum", "anyOf"):
        if key in schema and not (_is_list(schema[key]) and schema[key]):
            raise SchemaError(f"{where} has an {key} that is not a list of values")
    for key in ("minimum", "maximum"):
        if not _is(schema.get(key, 0), "number"):
            raise SchemaError(f"{where} has a {key} that is not a number")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not all(isinstance(name, str) for name in properties):
        raise SchemaError(f"{where} has properties that are not a dict")
    if not _is_list(required) or not all(isinstance(name, str) for name in required):
        raise SchemaError(f"{where} requires what is no list of names")
    if missing := sorted(set(required) - set(properties)) if properties else []:
        raise SchemaError(f"{where} requires {missing[0]!r}, which is not among its properties")
    inner = {f"{where}.{name}": one for name, one in properties.items()}
    inner |= {f"{where} ({number})": one for number, one in enumerate(schema.get("anyOf", ()))}
    inner |= {f"{where}.{key}": schema[key] for key in ("items", "additionalProperties") if key in schema}
    for place, one in inner.items():
        if not isinstance(one, bool):
            require_sound(one, place, depth + 1)


def problems(value: object, schema: Schema, where: str = "the value") -> list[str]:
    """Return the faults of ``value``, in words that tell what would be right; [] for none."""
    kinds = schema.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    choices, allowed = schema.get("anyOf"), schema.get("enum")
    if (
        (choices and all(problems(value, choice, where) for choice in choices))
        or (kinds and not any(_is(value, kind) for kind in kinds))
        or (allowed and not any(same(value, one) for one in allowed))
    ):
        return [f"{where} must be {_a(schema)}, not {shown(value)}"]
    if isinstance(value, dict):
        return _of_object(value, schema, where)
    if isinstance(value, list) and isinstance(items := schema.get("items"), Mapping):
        return [p for number, item in enumerate(value) for p in problems(item, items, f"{where}[{number}]")]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", -math.inf):
            return [f"{where} must be at least {schema['minimum']}, not {value}"]
        if value > schema.get("maximum", math.inf):
            return [f"{where} must be at most {schema['maximum']}, not {value}"]
    return []


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


def _inside(where: str, name: str) -> str:
    return f"argument {name!r}" if not where else f"{where}.{name}"


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _is(value: object, kind: str) -> bool:
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    return type(value) in _PLAIN and _PLAIN[type(value)] == kind


def same(one: object, other: object) -> bool:
    """Return whether two JSON values are equal: True is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def wanted(schema: Schema) -> str:
    """Return what ``schema`` asks for, in words."""
    values: Sequence[Any] = schema.get("enum", ())
    if values:
        return ("one of " if len(values) > 1 else "") + ", ".join(map(shown, values))
    if "anyOf" in schema:
        return " or ".join(map(wanted, schema["anyOf"]))
    kinds = schema.get("type", "any value")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def _a(schema: Schema) -> str:
    """Return what ``schema`` asks for with an article."""
    words = wanted(schema)
    return " or ".join(_ARTICLE.get(w, f"a {w}" if w in TYPES else w) for w in words.split(" or "))


def shown(value: object) -> str:
    """Return the value as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
