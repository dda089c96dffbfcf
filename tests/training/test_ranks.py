"""Several processes of one learner: the same numbers as one, and no process left when one is gone."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scenes.network import network
from scenes.tiny_models import ARCHITECTURES, write_model

from engine import placement
from engine.config import Config, LaunchConfig, ModelConfig, RunConfig
from engine.placement import Meeting
from engine.training.checkpoint import newest
from engine.training.checkpoint import read_tensors as tensors
from engine.training.parameters import layer_of
from engine.weights.store import header

HERE = Path(__file__).parent
LEARNER = {
    # the norms of the gradients are about this, so that some are cut and some are not
    "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.8},
    "kl": 0.1,
    "step_seconds": 60.0,
}
BATCHES = [
    {"seed": 1, "rows": 9, "bound": 64, "steps": 1},
    {"seed": 2, "rows": 2, "bound": 1000, "steps": 1},  # one micro-batch: a rank has nothing to do
    {"seed": 3, "rows": 5, "bound": 64, "steps": 2},
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def work(job: dict[str, Any], place: Path) -> list[str]:
    file = place.with_suffix(".json")
    file.write_text(json.dumps({"saves": [], **job, "out": str(place.with_suffix(".pt"))}))
    return [str(HERE / "rank_work.py"), str(file)]


def launched(ranks: int) -> list[str]:
    """The launcher that `accelerate launch` stands on."""
    if ranks == 1:
        return [sys.executable]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    each = ["--nproc-per-node", str(ranks), "--monitor-interval", "0.2"]
    return [sys.executable, "-m", "torch.distributed.run", *each, *meeting]


def environment() -> dict[str, str]:
    known = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE")}
    paths = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)])
    return {**known, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def attempt(job: dict[str, Any], place: Path, ranks: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launched(ranks), *work(job, place)],
        env=environment(), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def run(job: dict[str, Any], place: Path, ranks: int) -> dict[str, Any]:
    done = attempt(job, place, ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(place.with_suffix(".pt"), weights_only=True)
    return found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert len(found["looks"]) == len(expected["looks"])
    for one, other in zip(found["looks"], expected["looks"], strict=True):
        assert one["weights"].keys() == other["weights"].keys()
        for name, tensor in other["weights"].items():
            torch.testing.assert_close(one["weights"][name], tensor, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            torch.tensor(one["canary"]), torch.tensor(other["canary"]), atol=1e-4, rtol=0
        )
    for one, other in zip(found["metrics"], expected["metrics"], strict=True):
        for name in ("loss", "grad_norm", "ratio_mean", "trained_tokens", "kl", "loss_designer"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name


def compare_kept(ours: Path, theirs: Path) -> None:
    """Hold two checkpoints against each other: the weights, and all of the optimiser."""
    mine, other = tensors(ours), tensors(theirs)
    assert mine.model.keys() == other.model.keys()
    for name, tensor in other.model.items():
        torch.testing.assert_close(mine.model[name], tensor, atol=1e-5, rtol=0)
    one, two = mine.extra["optimizer"], other.extra["optimizer"]
    assert (one["kind"], one["groups"]) == (two["kind"], two["groups"])
    assert one["state"].keys() == two["state"].keys()
    for name, values in two["state"].items():
        assert one["state"][name].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(one["state"][name][key], value, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def alone(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The job, and what one process makes of it; it keeps checkpoints after the first and the last batch."""
    home = tmp_path_factory.mktemp("alone")
    job = {"learner": LEARNER, "policy": str(policy), "home": str(home), "batches": BATCHES}
    found = run({**job, "saves": [1, 3]}, home / "alone", 1)
    first, last = found["looks"][0]["weights"], found["looks"][-1]["weights"]
    assert max(float((last[name] - first[name]).abs().max()) for name in first) > 1e-3
    return job, found


def kept(home: str | Path, step: int) -> Path:
    return Path(home) / "kept" / f"000000-{step:010d}-000000000000"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hosts_equal_one(
    alone: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    """The launch line that `spade launch` writes for each of two hosts, here two network namespaces."""
    job, expected = alone
    config = Config(
        run=RunConfig(name="t"), model=ModelConfig(path="x"), launch=LaunchConfig(hosts={"learner": 2})
    )
    words = work({**job, "home": str(tmp_path)}, tmp_path / "two")
    with network(tmp_path_factory.mktemp("hosts"), 2) as hosts, ExitStack() as stack:
        known = {**environment(), "GLOO_SOCKET_IFNAME": "eth0"}
        lines = [
            placement.learner_launch(config, Meeting(2, str(rank), hosts[0].address, "29500"))
            for rank in range(2)
        ]
        assert {line[0] for line in lines} == {"torchrun"}
        started = [
            stack.enter_context(
                host.start(
                    "learner", sys.executable, "-m", "torch.distributed.run", *line[1:], *words, **known
                )
            )
            for host, line in zip(hosts, lines, strict=True)
        ]
        ends = [process.wait(280) for process in started]
        assert ends == [0, 0], [(host.home / "learner.out").read_text()[-3000:] for host in hosts]
    found = torch.load((tmp_path / "two").with_suffix(".pt"), weights_only=True)
    assert not found["looks"][0]["sharded"]
    compare(found, expected)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_ranks_equal_one(alone: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path):
    job, expected = alone
    found = run({**job, "home": str(tmp_path)}, tmp_path / "two", 2)
    assert not found["looks"][0]["sharded"]
    compare(found, expected)
    assert found["metrics"][1]["micro_batches"] == 1.0


@pytest.fixture(scope="module")
def of_two(alone: tuple[dict[str, Any], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that two sharded ranks write after the first batch, each its part."""
    home = tmp_path_factory.mktemp("two")
    run(
        {**alone[0], "sharded": True, "batches": BATCHES[:1], "saves": [1], "home": str(home)},
        home / "two",
        2,
    )
    return kept(home, 1)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_checkpoint_of_two_ranks_is_resumed_by(
    ranks: int, alone: tuple[dict[str, Any], dict[str, Any]], of_two: Path, tmp_path: Path
):
    """And what they keep at the end is what one process keeps."""
    job, expected = alone
    compare_kept(of_two, kept(job["home"], 1))
    resumed = {"sharded": ranks > 1, "resume": str(of_two), "batches": BATCHES[1:], "saves": [2]}
    found = run({**job, **resumed, "home": str(tmp_path)}, tmp_path / "resumed", ranks)
    assert found["looks"][0]["sharded"] == (ranks > 1)
    compare(found, {"looks": expected["looks"][1:], "metrics": expected["metrics"][1:]})
    compare_kept(kept(tmp_path, 2), kept(job["home"], 3))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sharded_ranks_keep_log_probs_and_gradients_in_float32(policy: Path, tmp_path: Path):
    """In bf16, with a reference that is sharded like the policy, layer by layer."""
    learner = {**LEARNER, "precision": "bf16"}
    job = {"learner": learner, "policy": str(policy), "home": str(tmp_path), "batches": BATCHES[:1]}
    expected = run(job, tmp_path / "one", 1)
    found = run({**job, "sharded": True}, tmp_path / "two", 2)
    first, last = found["looks"]
    assert first["how"] == "FSDP"
    apart = (torch.tensor(first["canary"]) - torch.tensor(expected["looks"][0]["canary"])).abs()
    assert apart.mean() < 1e-3, "one process answers the canary in float32 throughout"
    assert apart.max() < 4e-3, "half of what a rounded log-prob may be off"
    canary = torch.tensor(first["canary"])
    assert (canary.bfloat16().float() != canary).float().mean() > 0.9
    policy_units, reference_units = first["units"]
    assert policy_units == reference_units == 2 + 4  # layers; embedding, norm, head, root
    assert last["dtypes"] == ["torch.float32", "torch.bfloat16"]
    one, other = found["metrics"][0], expected["metrics"][0]
    assert one["kl"] == pytest.approx(0.0, abs=1e-6), "the reference is not the policy of the start"
    for name in ("loss", "ratio_mean", "grad_norm"):
        assert one[name] == pytest.approx(other[name], abs=1e-3), name
    for name, tensor in expected["looks"][1]["weights"].items():
        apart = (last["weights"][name] - tensor).abs()
        assert apart.mean() < 2e-5, "Adam moves each weight by 1e-3"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sharded_ranks_publish_the_file_of_one_and_replay_the_same_experts(tmp_path: Path):
    """Rank 0 holds its part and at most one layer of what is gathered."""
    mixture = write_model(tmp_path / "model", "qwen3_moe")
    job = {
        "learner": {**LEARNER, "router_replay": True, "gradient_checkpointing": True},
        "policy": str(mixture),
        "publishes": True,
        "batches": [{**BATCHES[0], "routed": True}],
    }
    alone, together = (
        run({**job, "sharded": ranks > 1, "home": str(tmp_path / name)}, tmp_path / name, ranks)
        for name, ranks in (("one", 1), ("two", 2))
    )
    one, two = alone["looks"][0], together["looks"][0]
    assert 0 < together["metrics"][0]["router_mismatch"] == alone["metrics"][0]["router_mismatch"] < 1
    compare({**together, "looks": together["looks"][1:]}, {**alone, "looks": alone["looks"][1:]})
    assert two["digest"] == one["digest"]
    sizes: dict[str, int] = defaultdict(int)
    for name, found in header(tmp_path / "two" / "published").items():
        sizes[layer_of(name)] += 2 * math.prod(found.shape)
    part = two["kept"]
    assert 0 < part <= (sum(sizes.values()) + max(sizes.values())) / 2
    assert part <= two["peak"] <= part + max(sizes.values()) < sum(sizes.values())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_sharded_ranks_publish_each_architecture_under_the_names_of_its_files(tmp_path: Path):
    """In bf16, before and after a step: the file of save_pretrained, then the weights in memory, rounded."""
    files = {name: write_model(tmp_path / name, name) / "model.safetensors" for name in ARCHITECTURES}
    job = {
        "learner": {**LEARNER, "precision": "bf16"}, "policy": str(tmp_path), "models": list(files),
        "home": str(tmp_path / "homes"), "publishes": "twice", "batches": BATCHES[:1], "sharded": True,
    }  # fmt: skip
    found = run(job, tmp_path / "two", 2)
    for name, file in files.items():
        assert found[name]["looks"][1]["how"] == "FSDP"
        trained = found[name]["looks"][2]["weights"]
        for published, expected in (("published", load_file(file)), ("again", trained)):
            written = load_file(tmp_path / "homes" / name / published)
            assert written.keys() == expected.keys(), name
            for key, tensor in expected.items():
                kept = key.endswith("e_score_correction_bias")  # float32 in transformers' files of all types
                sent = tensor if kept else tensor.bfloat16()
                assert written[key].dtype == sent.dtype, (name, published, key)
                assert torch.equal(written[key], sent), (name, published, key)
        assert not any(
            torch.equal(one, trained[key]) for key, one in load_file(file).items() if "_proj" in key
        )


@pytest.mark.long
@pytest.mark.timeout(400)
def test_ranks_killed_in_a_checkpoint_go_on_from_the_one_before(
    alone: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
):
    job, expected = alone
    here = {**job, "sharded": True, "home": str(tmp_path)}
    killed = attempt({**here, "saves": [1, 2], "dies": "writing"}, tmp_path / "killed", 2)
    assert "Signal 9 (SIGKILL)" in killed.stderr, killed.stderr[-4000:]
    assert list((tmp_path / "kept").glob(".*.tmp/optimizer.safetensors"))
    found = newest(tmp_path / "kept")
    assert found is not None
    assert found.path == kept(tmp_path, 1)
    resumed = {"resume": str(found.path), "batches": BATCHES[1:], "saves": [2]}
    compare(run({**here, **resumed}, tmp_path / "on", 2), {
        "looks": expected["looks"][1:], "metrics": expected["metrics"][1:]
    })  # fmt: skip
    compare_kept(kept(tmp_path, 2), kept(job["home"], 3))
    assert not list((tmp_path / "kept").glob(".*.tmp"))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dies", ["leader", "follower"])
def test_no_rank_outlives_another(dies: str, policy: Path, tmp_path: Path):
    """Without a launcher that would end them."""
    job = {"learner": LEARNER, "policy": str(policy), "home": str(tmp_path), "batches": BATCHES[:1]}
    words = work({**job, "dies": dies}, tmp_path / "job")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**environment(), **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=200)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    victim, survivor = (0, 1) if dies == "leader" else (1, 0)
    assert ranks[victim].returncode == 7
    assert ranks[survivor].returncode == 1
    assert "RankLost" in said[survivor]
    assert "in vain" in said[survivor]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_sharded_ranks_publish_the_adapters_of_one(policy: Path, tmp_path: Path):
    learner = {**LEARNER, "lora": {"rank": 4, "alpha": 8.0, "publish": "adapter"}}
    job = {"learner": learner, "policy": str(policy), "home": str(tmp_path), "batches": BATCHES[:1]}
    expected = run(job, tmp_path / "one", 1)
    assert all(".lora_" in name for name in expected["looks"][0]["weights"])
    found = run({**job, "sharded": True}, tmp_path / "two", 2)
    assert found["looks"][0]["how"] == "FSDP"
    compare(found, expected)
