"""Prompts as Jinja2 templates, one file a prompt: ``design_nano.j2``, ``play_full.j2`` and so on.

The warm start and the roles both render here, so a policy is trained on exactly the text it is asked with.
A template says its version in a comment, ``{# version: 2 #}``, 1 when it says none; the version is recorded
with every design. Files whose names begin with an underscore are parts of others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

import jinja2

from engine.errors import ConfigError
from sandbox.contract import STDLIB

_VERSION = re.compile(r"\{#-?\s*version:\s*(\d+)\s*-?#\}")
_TICKS = re.compile(r"`+")
# Importable, but of the machine, the clock or fresh chance: nothing that a game should stand on.
_words = str.split
_NO_USE = frozenset(
    _words("""
    __future__ io locale logging os os.path pathlib pprint queue secrets shlex sys time uuid warnings
    """)
)


@cache
def _environment() -> jinja2.Environment:
    # Prompts are plain text for a model, never HTML: escaping would corrupt programs.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("engine", "prompts"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters["fence"], environment.filters["tag"] = fence, tag
    return environment


def fence(text: str) -> str:
    """Return the shortest fence, of three backticks or more, that nothing in ``text`` closes."""
    return "`" * max(3, 1 + max(map(len, _TICKS.findall(str(text))), default=0))


def tag(text: str, name: str) -> str:
    """Return ``name``, with a number where ``text`` holds the tag already: nothing in it closes the other."""
    taken = set(re.findall(rf"</?({re.escape(name)}(?:-\d+)?)\s*>", str(text), re.IGNORECASE))
    taken = {found.lower() for found in taken}
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return next(one for one in (name, *numbered) if one not in taken)


def names() -> tuple[str, ...]:
    """Return the names that ``render`` knows, sorted."""
    templates = _environment().list_templates(extensions=["j2"])
    return tuple(sorted(name.removesuffix(".j2") for name in templates if not name.startswith("_")))


@cache
def version(name: str) -> str:
    """Return ``name/N``, N the version that the template says. Raises ConfigError for an unknown name."""
    environment = _environment()
    try:
        source, _, _ = environment.loader.get_source(environment, f"{name}.j2")  # type: ignore[union-attr]
    except jinja2.TemplateNotFound as error:
        raise _unknown(name) from error
    found = _VERSION.search(source)
    return f"{name}/{found[1] if found else 1}"


def imports(packages: Iterable[str] = ()) -> tuple[str, ...]:
    """Return what a prompt offers for import: the sandbox's own list, and the packages loaded there."""
    offered = {name for name in STDLIB if name not in _NO_USE}
    return (*sorted(offered), *packages)


def render(name: str, **variables: object) -> str:
    """Return the prompt ``name`` filled with ``variables``.

    Variables: design has skill, document, target, memory, max_turns and, but for nano, description, imports
    (:func:`imports`) and variant (tools); judge and hint have source; play has observation and hint (None or
    absent on the plain arm).
    Raises ConfigError for an unknown name or a variable the template needs and did not get.
    """
    try:
        return _environment().get_template(f"{name}.j2").render(**variables)
    except jinja2.TemplateNotFound as error:
        raise _unknown(name) from error
    except jinja2.UndefinedError as error:
        raise ConfigError(f"The prompt {name!r} lacks a variable: {error.message}.") from error


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"There is no prompt named {name!r}.", remedy=f"Known prompts: {', '.join(names())}.")
