"""The devices of servers, learner and frozen designer: what a recipe may say, and what the host has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine import placement
from engine.checks.settings import check
from engine.config import Config
from engine.errors import ConfigError

FROZEN = {"kind": "frozen"}


def recipe(server: dict[str, Any], learner: dict[str, Any] | None = None, **tables: Any) -> Config:
    run = {"name": "t", "roles": tables.pop("roles", ["designer", "server", "learner"])}
    model = {"path": "x", "max_model_len": 4096}
    return msgspec.convert(
        {"run": run, "model": model, "server": server, "learner": learner or {}, **tables}, Config
    )


def complaints(*tables: Any, **named: Any) -> dict[str, str]:
    return dict(check(recipe(*tables, **named)))


@pytest.mark.parametrize(
    ("server", "learner", "tables"),
    [
        ({}, {}, {}),
        ({"count": 7, "devices": list(range(7))}, {"devices": [7]}, {}),
        ({"devices": [0, 1, 2, 3], "args": {"tensor-parallel-size": 4}}, {"devices": [4, 5, 6, 7]}, {}),
        ({"count": 2, "devices": [0, 1, 4, 5], "args": {"tensor_parallel_size": 2}}, {"devices": [2]}, {}),
        ({"devices": [0]}, {"devices": [1]}, {"designer": FROZEN | {"frozen": {"devices": [2]}}}),
        ({"devices": [0]}, {"devices": [1]}, {"designer": FROZEN | {"frozen": {"url": "http://h:1"}}}),
        ({"devices": [0]}, {}, {"roles": ["server"]}),  # the learner works on another host
        ({"urls": ["http://h:1"]}, {"devices": [0, 1]}, {}),
    ],
)
def test_these_placements_are_possible(
    server: dict[str, Any], learner: dict[str, Any], tables: dict[str, Any]
) -> None:
    assert complaints(server, learner, **tables) == {}


@pytest.mark.parametrize(
    ("server", "learner", "tables", "key", "words"),
    [
        ({"devices": [1]}, {"devices": [0, 1]}, {}, "learner.devices", "device 1, which server.devices has"),
        ({"count": 7, "devices": [0, 1]}, {"devices": [7]}, {}, "server.devices", "need 7"),
        ({"count": 2, "devices": [0, 1], "args": {"tensor-parallel-size": 2}}, {"devices": [7]}, {},
         "server.devices", "with 2 a server"),
        ({"count": 2, "devices": [0, 0]}, {"devices": [7]}, {}, "server.devices", "named once"),
        ({"devices": [-1]}, {"devices": [7]}, {}, "server.devices", "from 0 on"),
        ({"devices": [0]}, {}, {}, "learner.devices", "must be set, as server.devices is"),
        ({}, {"devices": [0]}, {}, "server.devices", "must be set, as learner.devices is"),
        ({"devices": [0]}, {"devices": [1]}, {"designer": FROZEN}, "designer.frozen.devices", "must be set"),
        ({"devices": [0]}, {"devices": [1]}, {"designer": FROZEN | {"frozen": {"devices": [0]}}},
         "designer.frozen.devices", "device 0, which server.devices has"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "0,1"}}, {}, {}, "server.environment", "its own"),
        ({"urls": ["http://h:1"], "devices": [0]}, {"devices": [1]}, {}, "server.devices", "server.urls"),
    ],
)  # fmt: skip
def test_these_are_refused_by_key(
    server: dict[str, Any], learner: dict[str, Any], tables: dict[str, Any], key: str, words: str
) -> None:
    found = complaints(server, learner, **tables)
    assert list(found) == [key]
    assert words in found[key]


def test_devices_that_the_host_lacks_are_an_error_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe({"count": 7, "devices": list(range(7))}, {"devices": [7]})
    for found, words in ((8, ""), (None, ""), (7, "learner.devices names device 7, and this host has 7"),
                         (0, "server.devices names device 6, and this host has none")):  # fmt: skip
        monkeypatch.setattr(placement, "device_count", lambda found=found: found)
        if not words:
            placement.require_devices(config)
            continue
        with pytest.raises(ConfigError, match=words):
            placement.require_devices(config)


def test_a_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a number"):
        placement.workers(recipe({"args": {"tensor-parallel-size": "many"}}).server)


@pytest.mark.parametrize(
    ("learner", "refused"),
    [
        ({"devices": [1]}, False),
        ({"devices": [1, 2]}, True),
        ({"devices": [1, 2], "launch": ["torchrun", "--nproc-per-node", "2"]}, False),
        ({"devices": [1, 2], "launch": ["accelerate", "launch", "--use_fsdp"]}, True),
    ],
)
def test_nccl_from_a_sharded_learner_is_refused_before_the_start(
    learner: dict[str, Any], refused: bool
) -> None:
    found = complaints({"devices": [0], "port": 9000, "weights": "nccl"}, learner)
    assert ("server.weights" in found) == refused


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({}, "python -P"),
        ({"devices": [3]}, "env CUDA_VISIBLE_DEVICES=3 python -P"),
        ({"devices": [3, 5], "launch": ["torchrun", "--nproc-per-node", "2"]},
         "env CUDA_VISIBLE_DEVICES=3,5 torchrun --nproc-per-node 2"),
        ({"devices": [3, 5], "precision": "bf16"},
         "env CUDA_VISIBLE_DEVICES=3,5 accelerate launch --num_machines 1 --num_processes 2 "
         "--mixed_precision bf16 --dynamo_backend no --use_fsdp --fsdp_version 2"),
    ],
)  # fmt: skip
def test_the_learners_launch_follows_from_its_devices(learner: dict[str, Any], words: str) -> None:
    assert " ".join(placement.learner_launch(recipe({}, learner))).startswith(words)


SHARDED = (
    "accelerate launch --num_machines 2 --machine_rank 1 --main_process_ip head --main_process_port 29500"
)
WHOLE = "torchrun --nnodes 2 --node-rank 1 --master-addr head --master-port 29500 --nproc-per-node"


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({}, f"{WHOLE} 1"),
        ({"devices": [3, 5], "launch": ["torchrun", "--nproc-per-node", "2"]},
         f"env CUDA_VISIBLE_DEVICES=3,5 {WHOLE} 2"),
        ({"devices": [3, 5]}, f"env CUDA_VISIBLE_DEVICES=3,5 {SHARDED} --num_processes 4 --mixed"),
        ({"devices": [0]}, f"env CUDA_VISIBLE_DEVICES=0 {SHARDED} --num_processes 2"),
    ],
)  # fmt: skip
def test_a_learner_on_two_hosts_has_a_launch_line_for_each(learner: dict[str, Any], words: str) -> None:
    config = recipe({}, learner, launch={"hosts": {"learner": 2}})
    line = " ".join(placement.learner_launch(config, placement.Meeting(2, "1", "head", "29500")))
    assert line.startswith(words)
    assert placement.shards(config) == ("--use_fsdp" in line)


def test_a_server_over_two_hosts_has_half_of_its_workers_on_each() -> None:
    args = {"tensor-parallel-size": 4, "nnodes": 2}
    assert complaints({"devices": [0, 1], "args": args}, roles=["server"]) == {}
    assert "need 2" in complaints({"devices": [0, 1, 2, 3], "args": args}, roles=["server"])["server.devices"]
    config = recipe({"devices": [6, 7], "args": args}, roles=["server"])
    assert placement.of_server(config, 0) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    with pytest.raises(ConfigError, match="must divide the 4 workers"):
        placement.nodes(recipe({"args": {**args, "nnodes": 3}}).server)
