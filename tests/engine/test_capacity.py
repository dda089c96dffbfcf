"""A dry run's figures of devices, disks and rounds, and its refusals before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scenes.small_run import events, finished

from engine import recipe
from engine.config import Config
from engine.errors import ConfigError
from engine.inference import launch
from engine.records import history
from engine.run import RunDirectory
from engine.running import capacity, plan, preflight
from engine.training.footprint import GIB

CONFIGS = Path(__file__).parents[2] / "configs"
GOLDEN = Path(__file__).parents[1] / "data" / "plans.txt"
DDP = 'learner.launch=["torchrun","--nnodes=2","--nproc-per-node","4","-m"]'
FSDP = 'learner.launch=["accelerate","launch","--use_fsdp","--num_processes","8","-m"]'
ONE = "server.count=1"
REPLAY = "learner.router_replay=true"
FOUR = ("server.count=4", "server.devices=[0,1,2,3]", "learner.devices=[4,5,6,7]")
FROZEN = (*FOUR, "designer=frozen", "designer.frozen.devices=[4]", "learner.devices=[5,6,7]")


def load(name: str, *settings: str) -> Config:
    return recipe.load(CONFIGS / f"{name}.toml", settings).config


def needs(name: str, *settings: str, database: Path | None = None) -> str:
    config = load(name, *settings)
    return "\n".join(capacity.needs(config, capacity.shape_of(config), database))


def test_the_plans_of_the_shipped_recipes() -> None:
    names = [path.stem for path in sorted(CONFIGS.glob("*.toml")) if path.stem != "smol"]
    found = "\n".join(f"{name}\n{needs(name)}\n" for name in names)
    assert found == GOLDEN.read_text()
    assert "faster " not in found, "each recipe has the split that its plan proposes"
    assert "raise bus.store_gb" not in found, "two intervals of checkpoints fit"


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("qwen3-4b-games", ["learner.devices=[7]"], "about 83 GiB and 4 for its context, and H100 has 79"),
        ("qwen3-30b-a3b-games", ["run.card=H100"], "learner takes about 101 GiB"),
        ("qwen3-30b-a3b-games", ["run.card=A100-40", "run.roles=server"], "no room beside them"),
        ("qwen3-8b-games", [*FROZEN, "designer.frozen.path=hub:Qwen/Qwen3-30B-A3B",
                            'designer.frozen.args={"gpu-memory-utilization"="0.7"}'], "(designer.frozen"),
        ("qwen3-8b-games", ["learner.gradient_checkpointing=false"], "learner takes about"),
        ("qwen3-8b-games", ["learner.attention=eager"], "learner takes about"),
        ("qwen3-30b-a3b-games", [REPLAY], "its experts takes up to 13 MB, and bus.max_payload_mb is 8"),
        ("qwen3-8b-games", ["run.card=RTX"], 'Allowed: "" or "A100-40"'),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_named_card_is_refused(name: str, settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        preflight.check_start(load(name, *settings))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["learner.devices=[7]", "run.card=H200"],
        ["learner.devices=[7]", "run.card="],
        ["model.path=hub:google/gemma-3-4b-it"],
        ["server.devices=[]", "learner.devices=[]"],
        [DDP],  # it may shard in a way of its own
        [FSDP],
    ],
)
def test_what_fits_or_is_not_known_is_not(settings: list[str]) -> None:
    config = load("qwen3-4b-games", *settings)
    capacity.require_fitting(config, capacity.shape_of(config))


@pytest.mark.parametrize(
    ("name", "settings", "parts"),
    [
        ("qwen3-8b-games", [*FOUR, "learner.kl=0.0"], ["54.0 of 79", "reference 0.0"]),
        ("qwen3-8b-games", [*FOUR, "learner.optimizer.kind=adamw_8bit"], ["optimiser 3.8", "45.8 GiB"]),
        ("qwen3-4b-games", [*FOUR, "learner.lora.rank=32"], ["optimiser 0.1", "3 checkpoints of 0.7"]),
        ("qwen3-4b-games", ["learner.lora.rank=32", "learner.lora.publish=adapter"], ["6 versions of 0.2"]),
        ("qwen3-30b-a3b-games", [ONE, "server.args.tensor-parallel-size=2"], ["weights 28.4", "63.0"]),
        ("qwen3-30b-a3b-games", [ONE, "server.args.data-parallel-size=2"], ["weights 56.9"]),
        ("qwen3-30b-a3b-games", [ONE, "server.args.data-parallel-size=2",
                                 "server.args.enable-expert-parallel=true"], ["weights 29.9"]),
        ("qwen3-8b-games", FROZEN, ["designer.frozen [4]: weights 15.3"]),
        ("qwen3-4b-games", [DDP], ["83.3 of 79"]),
        ("qwen3-4b-games", [FSDP], ["25.1 of 79", "training 16"]),
        ("qwen3-4b-games", [*FOUR, "launch.hosts.learner=2"], ["25.1 of 79", "training 16"]),
        ("qwen3-30b-a3b-games", [REPLAY], ["0.4 GiB of samples per round"]),
        ("qwen3-4b-games", ["bus.store_gb=1"], ["raise bus.store_gb"]),
        ("qwen3-4b-games", ["run.card="], ["card       unknown", "47.5: weights"]),
        ("qwen3-4b-games", ["model.path=hub:google/gemma-3-4b-it"], ["config.json of google/gemma-3-4b-it"]),
    ],
)  # fmt: skip
def test_other_recipes_have_other_plans(name: str, settings: list[str], parts: list[str]) -> None:
    found = needs(name, *settings)
    assert [part for part in parts if part not in found] == []


@pytest.mark.parametrize(
    ("settings", "absent"),
    [
        (["run.card=A100-40", "model.path=hub:Qwen/Qwen3-30B-A3B"], "round  "),  # no place for a play
        (["run.roles=learner", "bus.url=nats://h:1"], "server"),
        (["run.roles=agent,server", "bus.url=nats://h:1", "learner.devices=[]"], "disk"),
        (['server.urls=["http://h:1"]', "server.devices=[]"], "round  "),
        (["server.weights=nccl", "server.port=9000", "learner.devices=[6]"], "versions"),
        (["server.devices=[]", "learner.devices=[]"], "card"),
    ],
)
def test_what_a_host_does_not_do_is_not_in_its_plan(settings: list[str], absent: str) -> None:
    assert absent not in needs("qwen3-4b-games", *settings)


def test_recorded_plays_take_the_place_of_assumed_ones(tmp_path: Path) -> None:
    connection = history.create(tmp_path / "run.db")
    history.apply(connection, events([finished("a"), finished("b")]))
    connection.close()
    found = needs("qwen3-4b-games", database=tmp_path / "run.db")
    assert "240 plays of 3 tokens, the longest 3 (of 2 recorded plays)" in found
    (tmp_path / "run.db").write_text("no database")
    assert "assumed" in needs("qwen3-4b-games", database=tmp_path / "run.db")


def test_sizes_are_read_from_the_models_own_file(tmp_path: Path) -> None:
    sizes = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100, "head_dim": None, "rope_theta": 1e4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = load("qwen3-4b-games", f"model.path={tmp_path}")
    shape = capacity.shape_of(config)
    assert shape is not None
    assert shape.parameters == 2 * (4 * 64 * 64 + 3 * 64 * 128) + 2 * 64 * 100
    for unusable in ("[]", "{", json.dumps(sizes | {"model_type": "gemma3"}),
                     json.dumps(sizes | {"num_attention_heads": 0}), '{"model_type": "llama"}'):  # fmt: skip
        (tmp_path / "config.json").write_text(unusable)
        assert capacity.shape_of(config) is None
    assert capacity.shape_of(load("qwen3-4b-games", "model.path=hub:no/such/name")) is None


def test_host_memory_is_that_of_the_largest_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of the learner loads all weights in float32; the reference, too."""
    monkeypatch.setattr(launch, "on_cpu", lambda: False)
    made = plan.make(load("qwen3-8b-games"), RunDirectory(tmp_path))
    memory = {process.name: process.memory_gb for process in made.processes}
    assert memory["learner"] == pytest.approx(8.19e9 * 4 * 3 * 2 / GIB + 1, rel=0.01)
    assert memory["vllm 0"] < 2
