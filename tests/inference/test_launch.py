"""The command line of a server, its environment and its port."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from engine.config import Config, LearnerConfig, LoraConfig, ModelConfig, RunConfig, ServerConfig
from engine.errors import ConfigError, SpadeError
from engine.inference import launch
from engine.inference.launch import check_args, command, environment, port_for

MODEL = Path("/models/x")


def config(**server) -> Config:
    return Config(
        run=RunConfig(name="t"), model=ModelConfig(path="x", max_model_len=256), server=ServerConfig(**server)
    )


def flags(words: list[str]) -> dict[str, str | None]:
    """Flag -> value, None for a bare flag."""
    found: dict[str, str | None] = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            following = words[index + 1] if index + 1 < len(words) else "--"
            found[word[2:]] = None if following.startswith("--") else following
    return found


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(launch, "on_cpu", lambda: request.param)
    return request.param


def test_defaults(on_cpu: bool) -> None:
    found = flags(command(config(max_concurrency=100), MODEL, 1234))
    assert found["model"] == str(MODEL)
    assert found["port"] == "1234"
    assert found["host"] == "127.0.0.1"
    assert found["max-model-len"] == "256"
    assert found["max-num-seqs"] == "132"
    assert found["logprobs-mode"] == "processed_logprobs"
    assert found["weight-transfer-config"] == '{"backend": "spade_file"}'
    assert found["tokens-only"] is None
    assert ("distributed-executor-backend" in found) == on_cpu
    assert ("enforce-eager" in found) == on_cpu
    assert ("disable-log-stats" in found) == on_cpu, (
        "the pool reads queue and preemptions from the statistics"
    )


def test_the_recipe_overrides_adds_and_removes(on_cpu: bool) -> None:
    args = {
        "max_num_seqs": 7,
        "--seed": 5,
        "disable-log-stats": False,
        "enable-prefix-caching": True,
        "host": "0.0.0.0",
    }
    found = flags(command(config(args=args), MODEL, 1))
    assert found["max-num-seqs"] == "7"
    assert found["seed"] == "5"
    assert found["host"] == "0.0.0.0"
    assert found["enable-prefix-caching"] is None
    assert "disable-log-stats" not in found


PASSED = {
    "tensor-parallel-size": 4,
    "pipeline-parallel-size": 2,
    "data-parallel-size": 2,
    "quantization": "fp8",
    "kv-cache-dtype": "fp8",
    "enable-lora": True,
    "max-lora-rank": 64,
    "max-loras": 2,
    "enable-expert-parallel": True,
}


def test_routed_experts_are_returned_where_they_are_replayed(on_cpu: bool, tmp_path: Path) -> None:
    plain = config()
    replaying = msgspec.structs.replace(plain, learner=LearnerConfig(router_replay=True))
    assert "enable-return-routed-experts" not in flags(command(plain, MODEL, 1))
    assert flags(command(replaying, MODEL, 1))["enable-return-routed-experts"] is None
    assert "enable-return-routed-experts" not in flags(command(replaying, MODEL, 1, updates=False))
    if on_cpu:
        with pytest.raises(ConfigError, match=r"router_replay.*CPU build returns no routed experts"):
            check_args(replaying, tmp_path / "later")


def test_parallelism_quantisation_and_adapters_pass_through(on_cpu: bool) -> None:
    for spelled in (PASSED, {name.replace("-", "_"): value for name, value in PASSED.items()}):
        found = flags(command(config(args=spelled), MODEL, 1))
        for name, value in PASSED.items():
            assert found[name] == (None if value is True else str(value))
        assert "distributed-executor-backend" not in found, "ours is for one worker"


@pytest.mark.parametrize(
    "args",
    [
        {"distributed-executor-backend": "ray", "tensor-parallel-size": 16},
        {"nnodes": 2, "node-rank": 0, "master-addr": "10.0.0.1", "tensor-parallel-size": 16},
        {"data_parallel_address": "10.0.0.1", "data_parallel_size": 2, "data_parallel_size_local": 1},
        {"data-parallel-backend": "ray", "data-parallel-size": 2},
    ],
    ids=["ray", "mp", "dp", "dp-ray"],
)
def test_a_server_on_several_hosts_is_not_tied_to_loopback(on_cpu: bool, args: dict) -> None:
    found = flags(command(config(args=args), MODEL, 1))
    for key, value in args.items():
        assert found[key.replace("_", "-")] == str(value)
    assert environment(config()).get("VLLM_HOST_IP") == "127.0.0.1"
    assert "VLLM_HOST_IP" not in environment(config(args=args))
    own = environment(config(args=args, environment={"VLLM_HOST_IP": "10.0.0.1"}))
    assert own["VLLM_HOST_IP"] == "10.0.0.1"


@pytest.mark.parametrize(("rank", "largest"), [(1, "1"), (8, "8"), (9, "16"), (65, "128"), (512, "512")])
def test_a_server_that_is_given_adapters_takes_no_weights(on_cpu: bool, rank: int, largest: str) -> None:
    adapted = msgspec.structs.replace(
        config(), learner=LearnerConfig(lora=LoraConfig(rank=rank, publish="adapter"))
    )
    found = flags(command(adapted, MODEL, 1))
    assert found["enable-lora"] is None
    assert (found["max-lora-rank"], found["max-loras"]) == (largest, "5")
    assert "weight-transfer-config" not in found
    assert environment(adapted)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "enable-lora" not in flags(command(adapted, MODEL, 1, updates=False)), "it is never given any"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(config())
    own = msgspec.structs.replace(adapted, server=ServerConfig(args={"max-loras": 9}))
    assert flags(command(own, MODEL, 1))["max-loras"] == "9"


@pytest.mark.parametrize(
    "flag", ["model", "port", "weight_transfer_config", "--api-key", "headless", "api-server-count"]
)
def test_flags_of_ours_are_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.lstrip("-").split("_")[0]):
        command(config(args={flag: "x"}), MODEL, 1)


def test_a_block_size_that_dies_at_start_is_refused(on_cpu: bool) -> None:
    if on_cpu:
        with pytest.raises(ConfigError, match="block-size = 16"):
            command(config(args={"block-size": 16}), MODEL, 1)
    else:
        command(config(args={"block-size": 16}), MODEL, 1)
    assert flags(command(config(args={"block-size": 64}), MODEL, 1))["block-size"] == "64"


def test_environment(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPADE_BUS_TOKEN", "secret")
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    monkeypatch.setenv("KEPT", "yes")
    values = environment(config(environment={"OMP_NUM_THREADS": "3"}))
    assert "SPADE_BUS_TOKEN" not in values
    assert values["KEPT"] == "yes"
    assert values["VLLM_SERVER_DEV_MODE"] == values["HF_HUB_OFFLINE"] == "1"
    assert values["OMP_NUM_THREADS"] == "3"
    assert ("VLLM_CPU_OMP_THREADS_BIND" in values) == on_cpu


def test_a_taken_port_is_told_with_a_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SpadeError, match=f"port {port} is taken") as caught:
            port_for(config(port=port).server, 0)
        assert "0 for a free one" in caught.value.remedy
    assert port_for(config(port=port).server, 0) == port


def test_free_ports_are_found_and_configured_ones_are_numbered() -> None:
    assert port_for(config().server, 0) > 1023
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        base = probe.getsockname()[1] - 1
    assert port_for(config(port=base).server, 1) == base + 1


FAKE_PARSER = """
import argparse, grp

class FlexibleArgumentParser(argparse.ArgumentParser):
    pass

def make_arg_parser(parser):
    parser.add_argument("--port", choices=["1"])
    return parser

def validate_parsed_serve_args(arguments):
    pass
"""


@pytest.fixture
def fake_vllm_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``vllm`` that imports in no time, found by child processes before the real one."""
    root = tmp_path / "packages" / "vllm"
    packages = ("", "engine/", "entrypoints/", "entrypoints/launchers/", "utils/")
    files = {f"{package}__init__.py": "" for package in packages} | {
        "engine/arg_utils.py": "AsyncEngineArgs = None",
        "entrypoints/launchers/cli_args.py": FAKE_PARSER,
        "utils/argparse_utils.py": "from vllm.entrypoints.launchers.cli_args import FlexibleArgumentParser",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(root.parent))
    monkeypatch.setattr(launch, "flags", lambda config, model, port: ["--port", str(port)])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return root


@pytest.mark.parametrize("name", ["grp.py", "argparse.py", "vllm.py"])
def test_a_file_of_the_working_directory_does_not_enter_a_child(fake_vllm_package: Path, name: str) -> None:
    Path(name).write_text("raise SystemExit('a file of the user ran')")
    check_args(config(port=1), Path("later"))


def test_a_refusal_and_a_failed_import_are_told_apart(fake_vllm_package: Path) -> None:
    with pytest.raises(ConfigError, match=r"vLLM refuses its command line: .*'2'"):
        check_args(config(port=2), Path("later"))
    for fault in (
        "raise ImportError('no such lib')",
        "raise SystemExit('lib ended')",
        "import no_such_thing",
    ):
        (fake_vllm_package / "engine" / "arg_utils.py").write_text(fault)
        with pytest.raises(SpadeError, match=r"vLLM cannot be imported .*(such|ended)") as caught:
            check_args(config(port=1), Path("later"))
        assert not isinstance(caught.value, ConfigError)


def test_every_command_line_is_safe_from_the_working_directory(on_cpu: bool) -> None:
    assert command(config(), MODEL, 1)[1:3] == ["-P", "-m"]
    assert environment(config())["PYTHONSAFEPATH"] == "1"
    words = launch.external_command(config(), "model", "http://host:9000")
    assert words[words.index("python") + 1] == "-P"
    assert "PYTHONSAFEPATH=1" in words


SPREAD = {"nnodes": 2, "node-rank": 1, "master-addr": "10.0.0.1", "tensor-parallel-size": 16}


def test_the_workers_of_another_host_have_the_flags_of_the_first(on_cpu: bool) -> None:
    spread = config(args={**SPREAD, "host": "0.0.0.0"})
    words = launch.headless(spread, MODEL)
    assert words[1:4] == ["serve", str(MODEL), "--headless"]
    first = flags(command(spread, MODEL, 1))
    assert flags(words[3:]) == {"headless": None} | {
        flag: value for flag, value in first.items() if flag not in ("model", "host", "port")
    }
    assert first["node-rank"] == "1"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_vllms_own_parser_refuses_a_flag_that_it_does_not_know(tmp_path: Path) -> None:
    """In tests/configs/test_recipes.py it accepts those of the recipes."""
    with pytest.raises(ConfigError, match="no-such-flag"):
        check_args(config(args={"no-such-flag": 1}), tmp_path / "later")
