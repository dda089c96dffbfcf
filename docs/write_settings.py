"""Write docs/settings.md, the reference of all keys of a recipe, from the Structs of engine.config.

Run it from the root of the checkout: python docs/write_settings.py
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from engine.config import Config
from engine.recipe import bounds

PAGE = Path(__file__).with_name("settings.md")
HEAD = """# Settings

All keys of a recipe, by table. An override on the command line has the same names: `server.count=2`. The file
is written by `docs/write_settings.py`; [Recipes](recipes.md) explains how recipes extend each other and how
they are checked. Terms are those of the [glossary](glossary.md). `spade recipes --schema` prints the same as
a JSON schema for editors.
"""


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join([HEAD, *tables(Config, "")])


def tables(kind: type[msgspec.Struct], prefix: str, given: Any = None) -> Iterator[str]:
    """Yield the section of a table and those of the tables in it; ``given`` is the default of the table."""
    hints = get_type_hints(kind, include_extras=True)
    fields = msgspec.structs.fields(kind)
    rows = [
        f"| `{field.encode_name}` | {shown(hints[field.name])} | {default(field, given)} |"
        for field in fields
        if hints[field.name] is not table(hints[field.name])
    ]
    if prefix:
        yield f"## [{prefix}]\n\n{prose(kind)}\n"
    if rows:
        yield "\n".join(["| key | type | default |", "|---|---|---|", *rows, ""])
    for field in fields:
        found = table(hints[field.name])
        if found is not None:
            inner = value_of(field, given)
            inner = inner if isinstance(inner, found) else None
            yield from tables(found, f"{prefix}.{field.encode_name}".lstrip("."), inner)


def table(hint: Any) -> type[msgspec.Struct] | None:
    """Return the Struct that a key holds, also as an item of a list; None for a plain value."""
    for one in (hint, *get_args(hint)):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            return one
        for deeper in get_args(one):
            if isinstance(deeper, type) and issubclass(deeper, msgspec.Struct):
                return deeper
    return None


def shown(hint: Any) -> str:
    """Return a type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{shown(arguments[0])}, {bounds(arguments[1])}"
    if origin is Literal:
        return " or ".join(f"`{json.dumps(one)}`" for one in arguments)
    if origin is tuple:
        return f"list of {shown(arguments[0])}"
    if origin is dict:
        return f"table of {shown(arguments[1])}"
    if origin in (Union, types.UnionType):
        return " or ".join(shown(one) for one in arguments if one is not type(None))
    words = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return words.get(hint) or ("table" if table(hint) else "any value")


def value_of(field: msgspec.structs.FieldInfo, given: Any) -> Any:
    """Return the default of a field: that of ``given``, else the field's own; NODEFAULT without one."""
    if given is not None:
        return getattr(given, field.name)
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def default(field: msgspec.structs.FieldInfo, given: Any) -> str:
    """Return a default as TOML writes it; a key without one must be given."""
    value = value_of(field, given)
    if value is msgspec.NODEFAULT:
        return "required"
    if isinstance(value, msgspec.Struct) or (value and isinstance(value, tuple) and table(type(value[0]))):
        return "see below"
    return f"`{json.dumps(msgspec.to_builtins(value))}`" if value is not None else "none"


def prose(kind: type[msgspec.Struct]) -> str:
    """Return a docstring as Markdown: one backtick, no roles of Sphinx."""
    text = inspect.getdoc(kind) or ""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text.replace("``", "`"))


if __name__ == "__main__":
    PAGE.write_text(page())
