"""Tables of designers and learners: what cannot run is refused by its key."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.checks.settings import check
from engine.config import Config

SUITES = {"suites": [{"name": "mid", "source": "seeds:mid"}]}
EXTERNAL = {"base_url": "https://host/v1", "model": "m"}


def external(**fields: Any) -> dict[str, Any]:
    return {"kind": "external", "external": EXTERNAL | fields}


def recipe(designer: dict[str, Any], **tables: Any) -> Config:
    return msgspec.convert(
        {
            "run": {"name": "t"},
            "model": {"path": "x", "max_model_len": 4096},
            "curriculum": {"environments": 24, "rounds_per_window": 4},
            "designer": designer,
            **tables,
        },
        Config,
    )


def complaints(designer: dict[str, Any] | None = None, **tables: Any) -> list[str]:
    """Return the keys that the checks of a recipe complain about."""
    return [key for key, _ in check(recipe(designer or {}, **tables))]


@pytest.mark.parametrize(
    "designer",
    [
        {},
        {"designs_per_ticket": 3},
        {"sampling": {"temperature": 0.6, "max_tokens": 256}},
        {"kind": "frozen", "sampling": {"temperature": 0.6, "top_p": 0.95, "max_tokens": 256}},
        {"kind": "external", "external": EXTERNAL, "sampling": {"temperature": 0.6, "max_tokens": 256}},
        {"kind": "external", "external": EXTERNAL, "sampling": {"max_tokens": 16000}},
        {"kind": "external", "external": EXTERNAL | {"max_cost": 5, "price_out": 10}},
        {"hint_writer": "external", "external": EXTERNAL | {"context_tokens": 300}},
        {"kind": "external", "external": EXTERNAL | {"base_url": "http://[::1]:8000/v1"}, "prompt": "tools"},
        {"hint_writer": "external", "external": EXTERNAL, "prompt": "nano"},
        {"skills": ["Negotiation", "Optimization"], "skills_per_cohort": 0},
        {"skills": ["optimisation"], "custom_skills": [{"name": "optimisation"}], "skills_per_cohort": 0},
        {"kind": "pool", "pool": {"source": "dir:programs"}},
        {"kind": "pool", "pool": {"source": "reasoning_gym:"}},
        {"kind": "pool", "pool": {"source": "gem:"}},
    ],
)
def test_these_can_run(designer: dict[str, Any]) -> None:
    assert complaints(designer) == []


@pytest.mark.parametrize(
    ("designer", "key"),
    [
        ({"sampling": {"temperature": 0.0}}, "designer.sampling.temperature"),
        ({"sampling": {"top_p": 0.9}}, "designer.sampling.top_p"),
        ({"kind": "frozen", "sampling": {"max_tokens": 16000}}, "designer.sampling.max_tokens"),
        ({"kind": "external"}, "designer.external.base_url"),
        (external(base_url="http://"), "designer.external.base_url"),
        (external(base_url="http://x:port/v1"), "designer.external.base_url"),
        ({"kind": "external", "external": EXTERNAL, "prompt": "nano"}, "designer.prompt"),
        ({"skills": ["Optimisation"], "skills_per_cohort": 0}, "designer.skills"),
        ({"skills": ["optimization"], "skills_per_cohort": 0}, "designer.skills"),
        ({"skills": ["gmaes"], "skills_per_cohort": 0}, "designer.skills"),
        ({"skills": ["games", "Negotiation"], "skills_per_cohort": 0}, "designer.skills"),
        ({"skills": ["Multi Step Workflows"], "skills_per_cohort": 0}, "designer.skills"),
        ({"kind": "external", "external": {"base_url": "https://x"}}, "designer.external.model"),
        (external(context_tokens=99), "designer.external.context_tokens"),
        (external(max_cost=5), "designer.external.max_cost"),
        (
            external(context_tokens=500)
            | {"kind": "policy", "hint_writer": "external", "hint_sampling": {"max_tokens": 450}},
            "designer.external.context_tokens",
        ),
        ({"hint_writer": "external"}, "designer.external.base_url"),
        ({"kind": "frozen", "frozen": {"url": "host:1"}}, "designer.frozen.url"),
        ({"kind": "frozen", "frozen": {"url": "http://h:1", "path": "p"}}, "designer.frozen.path"),
        ({"kind": "pool"}, "designer.pool.source"),
        ({"kind": "pool", "pool": {"source": "zip:x"}}, "designer.pool.source"),
        (
            {"kind": "pool", "pool": {"source": "dir:x"}, "designs_per_ticket": 2},
            "designer.designs_per_ticket",
        ),
        ({"designs_per_ticket": 4}, "designer.designs_per_ticket"),
    ],
)
def test_these_cannot(designer: dict[str, Any], key: str) -> None:
    assert key in complaints(designer)


def test_a_design_alone_is_no_group() -> None:
    learner = {"designer": {"scope": "group"}}
    assert complaints(learner=learner) == ["learner.designer.scope"]
    assert complaints({"designs_per_ticket": 2}, learner=learner) == []
    assert complaints({"kind": "frozen"}, learner=learner) == []


def test_the_designers_training_keeps_its_defaults_beside_a_setting() -> None:
    training = recipe({}, learner={"designer": {"max_staleness": 9}}).learner.designer
    assert (training.scope, training.normalise, training.advantage_scale) == ("skill", "centre", 10.0)


@pytest.mark.parametrize("port", [4222, 8001])
def test_a_frozen_server_has_a_port_of_its_own(port: int) -> None:
    frozen = {"kind": "frozen", "frozen": {"port": port}}
    taken = complaints(frozen, server={"port": 8000, "count": 2}, bus={"port": 4222})
    assert taken == ["designer.frozen.port"]


def test_a_frozen_server_is_none_of_the_runs() -> None:
    frozen = {"kind": "frozen", "frozen": {"url": "http://h:1"}}
    assert complaints(frozen, server={"urls": ["http://h:1"]}) == ["designer.frozen.url"]


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
def test_these_learners_can_run(learner: dict[str, Any]) -> None:
    assert complaints(learner=learner, evaluator=SUITES) == []


@pytest.mark.parametrize(
    ("learner", "key"),
    [
        ({"best_by": "hard"}, "learner.best_by"),
        ({"best_by": "metric:"}, "learner.best_by"),
        ({"best_by": "metric:-"}, "learner.best_by"),
        ({"lora": {"publish": "adapter"}}, "learner.lora.publish"),
        ({"lora": {"rank": 513, "publish": "adapter"}}, "learner.lora.publish"),
    ],
)
def test_these_learners_cannot(learner: dict[str, Any], key: str) -> None:
    assert complaints(learner=learner, evaluator=SUITES) == [key]


@pytest.mark.parametrize(
    ("server", "keys"),
    [({"weights": "bus"}, []), ({"weights": "nccl", "port": 8000}, ["learner.lora.publish"])],
)
def test_adapters_travel_as_whole_files(server: dict[str, Any], keys: list[str]) -> None:
    lora = {"rank": 8, "publish": "adapter"}
    found = complaints(learner={"lora": lora}, server=server)
    assert [key for key in found if key == "learner.lora.publish"] == keys
