"""Prompts as Jinja2 templates, one file a prompt: ``design_nano.j2``, ``play_full.j2`` and so on.

The warm start and the roles both render here, so a policy is trained on exactly the text it is asked with.
"""

from __future__ import annotations

from functools import cache

import jinja2

from engine.errors import ConfigError


@cache
def _environment() -> jinja2.Environment:
    # Prompts are plain text for a model, never HTML: escaping would corrupt programs.
    return jinja2.Environment(
        loader=jinja2.PackageLoader("engine", "prompts"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )


def names() -> tuple[str, ...]:
    """Return the names that ``render`` knows, sorted."""
    return tuple(
        sorted(name.removesuffix(".j2") for name in _environment().list_templates(extensions=["j2"]))
    )


def render(name: str, **variables: object) -> str:
    """Return the prompt ``name`` filled with ``variables``.

    Variables: design has skill, document, target, memory, max_turns; hint has source; play has
    observation and hint (None or absent on the plain arm).
    Raises ConfigError for an unknown name or a variable the template needs and did not get.
    """
    try:
        return _environment().get_template(f"{name}.j2").render(**variables)
    except jinja2.TemplateNotFound as error:
        raise ConfigError(
            f"There is no prompt named {name!r}.", remedy=f"Known prompts: {', '.join(names())}."
        ) from error
    except jinja2.UndefinedError as error:
        raise ConfigError(f"The prompt {name!r} lacks a variable: {error.message}.") from error
