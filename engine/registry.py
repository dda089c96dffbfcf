"""Registries of plug-ins: one entry-point group for each kind of part that a package can add.

The built-in parts are registered in ``pyproject.toml`` exactly as those of other packages are, so names are
known without importing anything, and each fact stands in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

import msgspec

from engine.errors import ConfigError

_KINDS = {
    (ROLES := "spade.roles"): "role",
    (REWARDS := "spade.rewards"): "reward",
    (CORPORA := "spade.corpora"): "corpus",
    (SUITES := "spade.suites"): "suite",
    (POOLS := "spade.pools"): "environment pool",
    (TRACKERS := "spade.trackers"): "tracker",
}
Settings = TypeVar("Settings", bound=msgspec.Struct)


@cache
def registered(group: str) -> Mapping[str, EntryPoint]:
    """Return the parts of a group by name."""
    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda entry: entry.name)}


def has_scheme(group: str, source: str) -> bool:
    """Return whether ``source`` ("scheme:argument") begins with a scheme of the group."""
    scheme, colon, _ = source.partition(":")
    return bool(colon) and scheme in registered(group)


def schemes(group: str) -> str:
    """Return the schemes of a group in words, for error texts."""
    names = [f"{name}:" for name in registered(group)]
    if not names:
        raise ConfigError(
            f"No entry point of the group {group} is installed.",
            remedy="The installed metadata is older than the project: install it again with `make setup`.",
        )
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def load(group: str, name: str, *, where: str) -> Any:
    """Import a registered part. ``where`` is the key of the recipe that names it.

    Raises ConfigError when it is not registered or cannot be imported.
    """
    known = registered(group)
    if name not in known:
        raise ConfigError(
            f"There is no {_KINDS[group]} {name!r}.",
            where=where,
            remedy=f"Registered in the entry-point group {group}: {', '.join(known) or 'none'}.",
        )
    try:
        return known[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The {_KINDS[group]} {name!r} ({known[name].value}) cannot be imported: {error}.",
            where=where,
            remedy=f"Install what it needs, or take it out of {where}.",
        ) from error


def settings(tables: Mapping[str, Mapping[str, Any]], name: str, kind: type[Settings]) -> Settings:
    """Return the recipe's table ``[plugins.NAME]`` as ``kind``; a missing table gives its defaults.

    Raises ConfigError that names the key for unknown keys and values that do not fit.
    """
    table, key = tables.get(name, {}), f"plugins.{name}"
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    unknown = sorted(table.keys() - set(known))
    if unknown:
        raise ConfigError(
            f"Unknown key {key}.{unknown[0]}.", remedy=f"Allowed in [{key}]: {', '.join(known) or 'no key'}."
        )
    try:
        return msgspec.convert(dict(table), kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        raise ConfigError(f"{key}{'.' if place else ''}{place.rstrip('`')}: {what}.") from error


def require_owners(tables: Mapping[str, Any], *others: str) -> None:
    """Check that each table ``[plugins.NAME]`` belongs to a registered part or to one of ``others``.

    Raises ConfigError.
    """
    known = {*others, *(name for group in _KINDS for name in registered(group))}
    for name in sorted(tables.keys() - known):
        raise ConfigError(
            f"[plugins.{name}] belongs to no plug-in that is installed here.",
            remedy=f"Name it after the entry point of its plug-in: {', '.join(sorted(known))}.",
        )
