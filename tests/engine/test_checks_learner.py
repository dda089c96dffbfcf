"""Recipes about checkpoints and adapters: what cannot run is said by key."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.checks.settings import check
from engine.config import Config

SUITES = {"suites": [{"name": "mid", "source": "seeds:mid"}]}


def complaints(learner: dict[str, Any]) -> list[str]:
    config = msgspec.convert(
        {"run": {"name": "t"}, "model": {"path": "x"}, "learner": learner, "evaluator": SUITES}, Config
    )
    return [key for key, _ in check(config)]


@pytest.mark.parametrize(
    "learner",
    [
        {},
        {"best_by": "mid"},
        {"best_by": "metric:entropy"},
        {"best_by": "metric:-loss"},
        {"lora": {"rank": 8, "targets": ["q_proj"]}},
        {"lora": {"rank": 8, "publish": "adapter"}},
        {"optimizer": {"kind": "paged_adamw_8bit"}},
    ],
)
def test_what_can_run(learner: dict[str, Any]):
    assert complaints(learner) == []


@pytest.mark.parametrize(
    ("learner", "key"),
    [
        ({"best_by": "hard"}, "learner.best_by"),
        ({"best_by": "metric:"}, "learner.best_by"),
        ({"best_by": "metric:-"}, "learner.best_by"),
        ({"lora": {"rank": -1}}, "learner.lora.rank"),
        ({"lora": {"rank": 8, "alpha": 0}}, "learner.lora.alpha"),
        ({"lora": {"publish": "adapter"}}, "learner.lora.publish"),
        ({"lora": {"rank": 513, "publish": "adapter"}}, "learner.lora.publish"),
    ],
)
def test_what_cannot(learner: dict[str, Any], key: str):
    assert complaints(learner) == [key]


@pytest.mark.parametrize(
    ("server", "keys"),
    [
        ({"weights": "bus"}, []),
        ({"weights": "nccl", "port": 8000}, ["learner.lora.publish"]),
    ],
)
def test_adapters_travel_as_whole_files(server: dict[str, Any], keys: list[str]):
    lora = {"rank": 8, "publish": "adapter"}
    tables = {"run": {"name": "t"}, "model": {"path": "x"}, "learner": {"lora": lora}, "server": server}
    found = [key for key, _ in check(msgspec.convert(tables, Config))]
    assert [key for key in found if key == "learner.lora.publish"] == keys
