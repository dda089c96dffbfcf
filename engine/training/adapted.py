"""Adapters that cannot be made, or that servers could not be given, said as faults of the recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.config import LoraConfig
from engine.errors import ConfigError

_REMEDY = "Name linear layers of the model, or none for all of them but the head."


@contextmanager
def explained(lora: LoraConfig) -> Iterator[None]:
    """Raise ConfigError where peft or TRL raise ValueError because of ``lora``."""
    try:
        yield
    except ValueError as error:
        if not lora.rank:
            raise
        raise ConfigError(
            f"learner.lora.targets = {list(lora.targets)}: {error}", where="learner.lora", remedy=_REMEDY
        ) from error


def require_untied(model: Any) -> None:
    """Refuse an adapter on an embedding that is the head as well: servers would add it to both.

    Raises ConfigError.
    """
    tied = hasattr(model, "peft_config") and model.config.get_text_config().tie_word_embeddings
    if tied and hasattr(model.get_input_embeddings(), "get_delta_weight"):
        raise ConfigError(
            "The model's embedding is its head as well, and an adapter would be added to one of them only",
            where="learner.lora.targets",
            remedy=_REMEDY,
        )
