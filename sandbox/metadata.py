"""What a program declares about itself, read strictly: goal, skill, difficulty, turn budget.

Either a dict ``METADATA`` of the class or the module, or lines ``key: value`` in a docstring. A program
without any is fine unless the settings require it; what is declared must be well-formed and true.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

VERSION = 1
Text = Annotated[str, Meta(min_length=1, max_length=600)]
Level = Literal["easy", "medium", "hard"]


class Metadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Version 1 of the declaration.

    ``difficulty`` is a word, or the expected share of won instances in [0, 1]; ``max_turns`` is the turn
    budget, after which an episode is over.
    """

    version: Annotated[int, Meta(ge=1)] = VERSION
    title: Text | None = None
    goal: Text | None = None
    skill: Text | None = None
    idea: Text | None = None
    win: Text | None = None
    difficulty: Level | Annotated[float, Meta(ge=0, le=1)] | None = None
    max_turns: Annotated[int, Meta(ge=1, le=1000)] | None = None


class _Declared(msgspec.Struct, frozen=True):
    source: Literal["METADATA", "docstring"]
    fields: dict[str, object] = {}
    error: str = ""


class Wrong(ValueError):
    """A declaration that is malformed or untrue, in words for the designer."""


def read(declared: str) -> Metadata | None:
    """Decode what the instance's process sent, None for nothing. Raises Wrong."""
    if not declared:
        return None
    try:
        found = msgspec.json.decode(declared, type=_Declared)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Wrong(f"the declared metadata cannot be read: {error}") from None
    if found.error:
        raise Wrong(found.error)
    fields = dict(found.fields)
    if found.source == "docstring":
        fields = {key: _number(str(value)) for key, value in fields.items()}
        for key in ("title", "goal", "skill", "idea", "win"):
            if key in fields:
                fields[key] = str(found.fields[key])[:600]
    version = fields.get("version", VERSION)
    if version != VERSION:
        raise Wrong(f"{found.source}: version {version!r} is not known, only {VERSION}")
    try:
        return msgspec.convert(fields, Metadata)
    except msgspec.ValidationError as error:
        known = ", ".join(Metadata.__struct_fields__)
        more = f"; known are {known}" if "unknown field" in str(error) else ""
        raise Wrong(f"{found.source}: {_plain(str(error))}{more}") from None


def contradiction(found: Metadata, *, offered: int, observed: int | None) -> str:
    """Say what is untrue in the declared turn budget, "" when nothing is.

    ``offered`` turns are played at most; ``observed`` is the object's own ``max_turns``.
    """
    if found.max_turns is None:
        return ""
    if found.max_turns > offered:
        return (
            f"declares {found.max_turns} turns, but at most {offered} are played; declare no more than those"
        )
    if observed is not None and observed != found.max_turns:
        return f"declares {found.max_turns} turns, but its max_turns is {observed}"
    return ""


def _number(text: str) -> object:
    """A finite number where the text is one (``12``, ``12 turns``, ``40 %``), else the text."""
    head = text.split()[0] if text.split() else ""
    value: int | float
    try:
        if text.rstrip().endswith("%"):
            value = float(text.rstrip().rstrip("%")) / 100
        else:
            value = int(head) if head.lstrip("-").isdecimal() else float(head)
    except ValueError:
        return text.lower()
    return value if isinstance(value, int) or math.isfinite(value) else text.lower()


def _plain(message: str) -> str:
    """Msgspec's words, with the names of fields instead of paths."""
    if " - at `$." not in message:
        return message
    what, _, where = message.partition(" - at `$.")
    return f"{where.rstrip('`')}: {what}"
