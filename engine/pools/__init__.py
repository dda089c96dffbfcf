"""Pools of environments by others: one module for each framework, registered in ``spade.pools``.

A module has a class from which programs derive, and ``read(argument)``, which yields (name, program). Such a
program names its environment and little else. It runs in the sandbox, which cannot import any more:
``preload(argument)`` of the same module names what is imported there before.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterable
from typing import Any

from engine import registry
from engine.errors import ConfigError

KEY = "designer.pool.source"
THREADLESS = "engine.pools.threadless"


def preload(source: str) -> tuple[str, ...]:
    """Return the modules that programs of a pool need in the sandbox."""
    scheme, _, argument = source.partition(":")
    reader = registry.load(registry.POOLS, scheme, where=KEY)
    needs = getattr(inspect.getmodule(reader), "preload", None)
    return (THREADLESS, *needs(argument)) if needs else ()


def names(argument: str, known: Iterable[str], package: str) -> list[str]:
    """Return the names of a list with commas, all of ``known`` for an empty one. Raises ConfigError."""
    found = [name.strip() for name in argument.split(",") if name.strip()]
    known = list(known)
    if unknown := sorted(set(found) - set(known)):
        raise ConfigError(
            f"{package} has no {', '.join(unknown)}.", where=KEY, remedy="Name none of them to take all."
        )
    return found or known


def resolve(path: str) -> Any:
    """Return the object at ``module:Name``. Raises ConfigError."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{path!r} cannot be imported: {error}.",
            where=KEY,
            remedy="Name a class that is installed here: module:Class.",
        ) from error


def program(base: type, title: str, **fields: object) -> str:
    """Return a program whose class derives from ``base`` and sets its fields."""
    name = "The" + re.sub(r"[\W_]", "", title.title())
    body = "".join(f"    {field} = {value!r}\n" for field, value in fields.items())
    # numpy is seeded for programs that name it
    heading = f"import numpy\n\nfrom {base.__module__} import {base.__name__}\n\n\n"
    return f"{heading}class {name}Env({base.__name__}):\n{body}"


def text(value: object) -> str:
    """Return what a player reads of an observation."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def paid(total: float | None) -> float:
    """Return a reward within the bounds of a return."""
    return max(-1.0, min(1.0, float(total or 0.0)))
