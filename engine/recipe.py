"""Recipes: TOML files decoded into the Structs of ``engine.config``, with errors that name the remedy.

A recipe may say ``extends = "other.toml"`` (relative to itself); its tables are laid over the other's, key
by key, and lists replace lists. Overrides from the command line (``learner.optimizer.learning_rate=1e-4``)
are laid over the result. Each value keeps its origin, so that every error names file, key, value and what
is allowed.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from engine import ablations
from engine.checks.settings import check
from engine.config import Config
from engine.errors import ConfigError

COMMAND_LINE = "the command line"
_ARTICLE = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_BOUNDS = {
    "ge": "at least",
    "gt": "greater than",
    "le": "at most",
    "lt": "below",
    "min_length": "its length at least",
}


class Recipe(msgspec.Struct, frozen=True):
    """A checked recipe. ``files`` are the TOML files it came from, the most basic first."""

    config: Config
    files: tuple[Path, ...]
    overrides: tuple[str, ...]


class _Source(msgspec.Struct):
    """The merged raw tables and, for each dotted key that was given, where it was given."""

    values: dict[str, Any]
    origins: dict[str, str]
    files: list[Path]


def load(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe at ``path`` with ``overrides`` laid over it.

    Raises ConfigError, naming file, key, value and what is allowed, for anything that is wrong with it.
    """
    source = _read(Path(path), ())
    for override in overrides:
        for setting in ablations.expand(override):
            _override(source, setting)
    ablations.resolve(source.values)
    config = _decode(source)
    problems = check(config)
    if problems:
        raise _conflicts(problems, source, config)
    return Recipe(config, tuple(source.files), tuple(overrides))


def dump(config: Config) -> str:
    """Return ``config`` as TOML that :func:`load` reads back to the same value."""
    import tomli_w

    return tomli_w.dumps(msgspec.to_builtins(config))


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two recipes differ, by dotted key, each with both values."""
    before, after = (dict(_flat(msgspec.to_builtins(config), "")) for config in (old, new))
    return {
        key: (before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def is_within(key: str, names: Iterable[str]) -> bool:
    """Return whether a dotted key is one of ``names``, or of a table among them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read(path: Path, above: tuple[Path, ...]) -> _Source:
    """Read ``path`` and what it extends; ``above`` are the files that led here."""
    if path.resolve() in above:
        chain = " -> ".join(item.name for item in (*above, path))
        raise ConfigError(
            f"extends goes round in a circle: {chain}", where=str(path), remedy="Cut one of them."
        )
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise _unreadable(path, above, error) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not a text in UTF-8: its byte {error.start} is {error.object[error.start]:#04x}.",
            remedy="A recipe is a TOML file; save it in UTF-8.",
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply for a recipe.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.", remedy="Mend that line.") from error
    parent = raw.pop("extends", None)
    if parent is not None and not isinstance(parent, str):
        raise ConfigError(f"extends = {_show(parent)} in {path} must be the name of a recipe file.")
    source = _Source({}, {}, []) if parent is None else _read(path.parent / parent, (*above, path.resolve()))
    _merge(source.values, raw, "", str(path), source.origins)
    source.files.append(path)
    return source


def _unreadable(path: Path, above: tuple[Path, ...], error: OSError) -> ConfigError:
    """Explain a recipe that cannot be read, with the recipes that can."""
    near = next((place for place in (path, path.parent) if place.is_dir()), Path("configs"))
    names = sorted(item.name for item in near.glob("*.toml"))
    asked = f", which {above[-1]} extends," if above else ""
    remedy = (
        f"Recipes in {near}: {', '.join(names)}." if names else f"There is no recipe in {near.resolve()}."
    )
    close = difflib.get_close_matches(path.name, names, 1, 0.4)
    if close:
        remedy = f"Did you mean {near / close[0]}? {remedy}"
    return ConfigError(f"The recipe {path}{asked} cannot be read: {error.strerror}.", remedy=remedy)


def _merge(
    below: dict[str, Any], above: Mapping[str, Any], prefix: str, origin: str, into: dict[str, str]
) -> None:
    """Lay ``above`` over ``below`` in place: tables key by key, anything else as a whole."""
    for key, value in above.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict):
            if not isinstance(below.get(key), dict):
                below[key] = {}
            _merge(below[key], value, f"{dotted}.", origin, into)
        else:
            below[key] = value
        into[dotted] = origin


def _override(source: _Source, text: str) -> None:
    """Lay one ``dotted.key=value`` over the source. The value is TOML; a bare word is a text."""
    dotted, equals, value = text.partition("=")
    dotted = dotted.strip()
    if not equals or not dotted:
        raise ConfigError(
            f"The override {text!r} is not of the form key=value.",
            where=COMMAND_LINE,
            remedy="Example: learner.optimizer.learning_rate=1e-4",
        )
    table: dict[str, Any] = {}
    leaf = table
    *tables, last = dotted.split(".")
    for key in tables:
        leaf = leaf.setdefault(key, {})
    leaf[last] = _parse(value.strip(), _type_at(dotted))
    _merge(source.values, table, "", COMMAND_LINE, source.origins)


def _parse(text: str, kind: Any) -> Any:
    """Return the value of an override: texts are taken as they stand, the rest is read as TOML."""
    kind = _plain(kind)
    if kind is str:
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if get_origin(kind) is tuple and "[" not in text:
            return [part.strip() for part in text.split(",") if part.strip()]
        return text


def _fields(kind: Any) -> dict[str, Any] | None:
    """Return field name -> type of a table, None when ``kind`` is not one."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    return None


def _plain(kind: Any) -> Any:
    """Return a type without its bounds."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _is_mapping(kind: Any) -> bool:
    return kind is dict or get_origin(kind) is dict


def _unknown(key: str, table: str, fields: Mapping[str, Any], value: Any, origin: str) -> ConfigError:
    """Name an unknown key, the nearest known ones, and all that its table has."""
    dotted = f"{table}.{key}" if table else key
    close = difflib.get_close_matches(key, list(fields), 1, 0.6)
    nearest = f"{table}.{close[0]}" if close and table else (close[0] if close else "")
    elsewhere = [name for name in _all_keys(Config, "") if name.rpartition(".")[2] == key]
    inside = [name for name in elsewhere if name.startswith(f"{table}." if table else "")]
    nearest = next(iter([*inside, nearest, *elsewhere] if nearest else elsewhere), "")
    guess = f"Did you mean {nearest}? " if nearest else ""
    where = f"[{table}]" if table else "the top level"
    return ConfigError(
        f"Unknown key {dotted} = {_show(value)} in {origin}.",
        remedy=f"{guess}Allowed in {where}: {', '.join(sorted(fields))}.",
    )


def _all_keys(kind: Any, prefix: str) -> Iterator[str]:
    for key, inner in (_fields(kind) or {}).items():
        yield f"{prefix}{key}"
        yield from _all_keys(inner, f"{prefix}{key}.")


def _decode(source: _Source) -> Config:
    """Convert the merged tables, or explain the first value that does not fit."""
    try:
        return msgspec.convert(source.values, Config)
    except msgspec.ValidationError as error:
        raise _misfit(str(error), source) from error


def _misfit(message: str, source: _Source) -> ConfigError:
    """Turn msgspec's message (``... - at `$.run.steps` ``) into file, key, value and what is allowed."""
    path = re.search(r" - at `\$\.?(.*?)`$", message)
    dotted = path[1] if path else ""
    if dotted.endswith("[...]"):
        dotted = _culprit(source, dotted.removesuffix("[...]"))
    what = message[: path.start()] if path else message
    unknown = re.search(r"unknown field `(.*)`", what, re.DOTALL)
    if unknown:
        key = f"{dotted}.{unknown[1]}" if dotted else unknown[1]
        fields, value = _fields(_type_at(dotted)) or {}, _value_at(source.values, dotted).get(unknown[1])
        return _unknown(unknown[1], dotted, fields, value, source.origins.get(key) or _origin(source, key))
    missing = re.search(r"missing required field `(.*?)`", what)
    if missing:
        key = f"{dotted}.{missing[1]}" if dotted else missing[1]
        return ConfigError(
            f"{key} is missing in {source.origins.get(dotted.split('[')[0], source.files[-1])} "
            "and has no default.",
            remedy=f"Give it: {_allowed(_type_at(key))}.",
        )
    value = _value_at(source.values, dotted)
    origin = _origin(source, dotted)
    return ConfigError(
        f"{dotted or 'the recipe'} = {_show(value)} in {origin} does not fit.",
        remedy=f"Allowed: {_allowed(_type_at(dotted))}.",
    )


def _culprit(source: _Source, dotted: str) -> str:
    """Return the key below the free table at ``dotted`` whose value does not fit, else ``dotted``."""
    kind = get_args(_type_at(dotted))[-1]
    for key, value in _value_at(source.values, dotted).items():
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            return f"{dotted}.{key}"
    return dotted


def _conflicts(problems: Sequence[tuple[str, str]], source: _Source, config: Config) -> ConfigError:
    """Report every pair of settings that contradict each other, one line each."""
    lines = []
    for key, complaint in problems:
        value = _value_at(msgspec.to_builtins(config), key)
        lines.append(f"{key} = {_show(value)} in {_origin(source, key)}: {complaint}")
    return ConfigError("\n".join(lines))


def _origin(source: _Source, dotted: str) -> str:
    """Return where the value at ``dotted`` was given, else that it is a default."""
    given = source.origins.get(dotted.split("[")[0])
    return given or f"{source.files[-1]} (by default)"


def _steps(dotted: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", dotted)


def _value_at(values: Any, dotted: str) -> Any:
    """Return the raw value at a dotted key with ``[0]`` indices, None when there is none."""
    for step in _steps(dotted):
        if isinstance(values, dict):
            values = values.get(step)
        elif isinstance(values, (list, tuple)) and step.isdigit() and int(step) < len(values):
            values = values[int(step)]
        else:
            break
    return values


def _type_at(dotted: str) -> Any:
    """Return the declared type at a dotted key."""
    kind: Any = Config
    for step in _steps(dotted):
        kind = _plain(kind)
        fields = _fields(kind)
        if fields is not None:
            kind = fields.get(step, Any)
        elif isinstance(kind, types.UnionType):
            kind = next((get_args(member)[0] for member in get_args(kind) if get_args(member)), Any)
        elif get_args(kind):
            kind = get_args(kind)[-1] if _is_mapping(kind) else get_args(kind)[0]
    return kind


def bounds(meta: msgspec.Meta) -> str:
    """Return the bounds of a type in words."""
    found = ((words, getattr(meta, name)) for name, words in _BOUNDS.items())
    return " and ".join(f"{words} {bound}" for words, bound in found if bound is not None)


def _allowed(kind: Any) -> str:
    """Say in words what a type allows."""
    if kind in _ARTICLE:
        return _ARTICLE[kind]
    arguments = get_args(kind)
    origin = get_origin(kind)
    if origin is Annotated:
        return f"{_allowed(arguments[0])}, {bounds(arguments[1])}"
    if origin is Literal:
        return " or ".join(json.dumps(item) for item in arguments)
    if origin is tuple:
        return f"a list, each item {_allowed(arguments[0])}"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(_allowed(item) for item in arguments))
    if _is_mapping(kind):
        return f"a table, each value {_allowed(arguments[1])}" if arguments else "a table"
    fields = _fields(kind)
    return f"a table with {', '.join(sorted(fields))}" if fields else "another value"


def _show(value: Any) -> str:
    """Return a value as the person wrote it, near enough, and not longer than a line."""
    text = (
        json.dumps(value, default=str)
        if not isinstance(value, str)
        else json.dumps(value, ensure_ascii=False)
    )
    return text if len(text) <= 80 else f"{text[:77]}..."
