"""Declarations of a program about itself, in a dict ``METADATA``: goal, skill, difficulty, turn budget."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(min_length=1, max_length=600)]
Level = Literal["easy", "medium", "hard"]


class Metadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The declared fields; unknown ones are ignored.

    ``difficulty`` is a word, or the expected share of won instances in [0, 1]; ``max_turns`` is the turn
    budget, after which an episode is over.
    """

    title: Text | None = None
    goal: Text | None = None
    skill: Text | None = None
    idea: Text | None = None
    win: Text | None = None
    difficulty: Level | Annotated[float, Meta(ge=0, le=1)] | None = None
    max_turns: Annotated[int, Meta(ge=1, le=1000)] | None = None


class _Declared(msgspec.Struct, frozen=True):
    fields: dict[str, object] = {}
    error: str = ""


class MetadataError(ValueError):
    """A declaration is malformed or untrue; the message is meant for the designer."""


def read(declared: str, *, offered: int = 1000, observed: int | None = None) -> Metadata | None:
    """Decode the declaration that the instance's process sent; return None when there is none.

    At most ``offered`` turns are played, ``observed`` is the object's own ``max_turns``. Raises MetadataError
    when METADATA is malformed or declares another turn budget.
    """
    if not declared:
        return None
    try:
        found = msgspec.json.decode(declared, type=_Declared)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MetadataError(f"the declared metadata cannot be read: {error}") from None
    if found.error:
        raise MetadataError(found.error)
    fields = dict(found.fields)
    if isinstance(level := fields.get("difficulty"), str):
        fields["difficulty"] = _level(level.strip())
    try:
        read = msgspec.convert(fields, Metadata)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise MetadataError(
            f"METADATA: {where.rstrip('`')}: {what}" if where else f"METADATA: {what}"
        ) from None
    if read.max_turns is not None and read.max_turns > offered:
        raise MetadataError(
            f"declares {read.max_turns} turns, but at most {offered} are played; declare no more than those"
        )
    if read.max_turns is not None and observed not in (None, read.max_turns):
        raise MetadataError(f"declares {read.max_turns} turns, but its max_turns is {observed}")
    return read


def _level(text: str) -> object:
    """Return a share for ``40 %`` or ``0.4``, else the word in lower case."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return text.lower()
