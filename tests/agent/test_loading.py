"""The objects of a tokenizer that was read hold up no play."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from scenes.template_models import FAMILIES, build

from engine.config import ModelConfig
from roles import work_loop

MODEL = ModelConfig(path="model", thinking="off")


@pytest.fixture
def thawed() -> Iterator[None]:
    work_loop._read_chat.cache_clear()
    yield
    work_loop._read_chat.cache_clear()
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_libraries_are_out_of_the_collectors_sight(tmp_path: Path) -> None:
    path = build(tmp_path, FAMILIES["qwen3"])
    before = gc.get_freeze_count()
    chat = work_loop._read_chat(path, MODEL)
    assert gc.get_freeze_count() - before > 50_000
    assert len(gc.get_objects()) < gc.get_freeze_count()
    assert work_loop._read_chat(path, MODEL) is chat
