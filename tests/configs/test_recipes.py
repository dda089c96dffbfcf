"""The recipes that are shipped: they load, they say what the paper says, and vLLM and TRL accept them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine import ablations, recipe
from engine.config import Config
from engine.errors import SpadeError
from engine.run import RunDirectory
from engine.running import plan
from roles.scorer import credit

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ALL = sorted(path.stem for path in CONFIGS.glob("*.toml"))
GAMES = [name for name in ALL if name.endswith("-games")]
TOOLS = [name for name in ALL if name.endswith("b-tools")]


def load(name: str) -> Config:
    return recipe.load(CONFIGS / f"{name}.toml").config


def test_the_promised_recipes_are_there() -> None:
    sizes = {f"qwen3-{size}-{kind}" for size in ("4b", "8b", "30b-a3b") for kind in ("games", "tools")}
    assert sizes | {"nano", "nano-tools", "smol"} <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_each_recipe_is_named_after_its_file_and_has_a_plan(name: str, tmp_path: Path) -> None:
    loaded = load(name)
    assert loaded.run.name == name
    text = plan.render(plan.make(loaded, RunDirectory(tmp_path)))
    assert "role learner" in text
    assert "--max-model-len" in text
    assert credit.mean_group_size(loaded) >= credit.FEWEST_COMPARED, "designs are compared with others"
    # a bfloat16 server differs from the float32 canary by half a nat: 0.02 would refuse every start
    assert loaded.canary_tolerance == (0.02 if loaded.model.dtype == "float32" else 1.0)
    given = recipe.load(CONFIGS / f"{name}.toml", ["server.canary_tolerance=0.3"]).config
    assert given.canary_tolerance == 0.3


@pytest.mark.parametrize("name", GAMES)
def test_the_games_recipes_have_the_papers_numbers(name: str) -> None:
    games = load(name)
    table = games.curriculum
    assert (table.environments, table.plays_per_round) == (24, 8)
    assert (table.rounds_per_window, table.delay) == (4, 4)
    assert (games.run.steps, games.designer.corpus) == (400, "pydoc:")
    assert len(games.designer.skills) == 6
    assert (table.schedule, games.designer.skills_per_cohort) == ("rolling", 1)
    agent, reward, learner = games.agent, games.reward, games.learner
    assert (agent.sampling.max_tokens, agent.context_tokens, agent.max_turns) == (8192, 32768, 25)
    assert (reward.plateau_weight, reward.regret_weight, reward.regret_scale) == (0.6, 0.4, 0.15)
    assert (reward.low, reward.high, reward.ramp) == (0.4, 0.6, 0.25)
    assert (learner.clip_low, learner.clip_high, learner.importance_cap) == (0.2, 0.28, 2.0)
    adam = learner.optimizer
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.weight_decay) == (1e-6, 0.9, 0.98, 0.1)
    assert games.learner.designer.advantage_scale == 32
    assert games.learner.kl == (0.005 if "8b" in name else 0.0)
    assert (games.model.thinking, games.model.history) == (
        ("on", "keep") if "8b" in name else ("unset", "template")
    )
    assert games.curriculum.lead == (3 if "4b" in name else 1)
    assert games.designer.sampling.max_tokens == (20_000 if "8b" in name else 16_384)


@pytest.mark.parametrize("name", TOOLS)
def test_the_tools_recipes_have_the_papers_numbers(name: str) -> None:
    tools, games = load(name), load(name.replace("-tools", "-games"))
    designer, table = tools.designer, tools.curriculum
    assert (designer.prompt, designer.skills[0], len(designer.skills)) == ("tools", "API Orchestration", 6)
    assert (table.schedule, designer.skills_per_cohort, designer.corpus) == ("epoch", 0, "botocore:")
    small = "4b" in name
    assert (table.environments, table.plays_per_round) == ((16, 16) if small else (24, 8))
    assert (table.rounds_per_window, table.delay, table.hinted_plays) == ((32, 32, 4) if small else (8, 8, 8))
    assert (tools.run.steps, tools.reward.variant) == ((500, "regret") if small else (400, "blend"))
    assert designer.hint_sampling.max_tokens == (512 if small else 2048)
    assert tools.learner.designer.max_staleness >= table.oldest_design
    assert (tools.learner.kl, tools.learner.designer.advantage_scale) == (0.005, 50.0)
    assert (tools.agent.truncated, tools.agent.malformed, tools.agent.tool_format) == (
        "mask",
        "mask",
        "native",
    )
    assert (designer.judge, designer.judge_sampling.max_tokens) == ("self", 16_384)
    assert tools.model == games.model


@pytest.mark.parametrize(
    ("settings", "factor", "value"),
    [
        (["corpus=off"], "corpus", "off"),
        (["memory=off"], "memory", "off"),
        (["skills=two"], "skills", "two_tools (2, 2 a cohort)"),
        (["designer=frozen", "designer.frozen.devices=[5]", "learner.devices=[6,7]"], "designer", "frozen"),
        (["designer.kind=pool", "designer.pool.source=dir:my/programs"], "designer", "pool"),
    ],
)
def test_baselines_and_ablations_are_there_for_tools_too(
    settings: list[str], factor: str, value: str
) -> None:
    path = CONFIGS / "qwen3-8b-tools.toml"
    before, after = (ablations.factors(recipe.load(path, given).config) for given in ([], settings))
    assert after == {**before, factor: value}


def test_parameters_are_counted(tmp_path: Path) -> None:
    assert plan.make(load("qwen3-8b-games"), RunDirectory(tmp_path)).parameters == 8_190_427_136
    other = recipe.load(CONFIGS / "qwen3-8b-games.toml", ["model.path=hub:mine/new-30B-A3B"]).config
    assert plan.count_parameters(other) == 30_000_000_000
    assert plan.count_parameters(load("smol")) == 135_000_000


@pytest.mark.parametrize("name", [*GAMES, *TOOLS])
def test_accelerate_accepts_the_learners_launch(name: str) -> None:
    from accelerate.commands.launch import launch_command_parser

    from engine.running.supervisor import Address, child_command

    words = child_command("learner", load(name), Address("nats://h:1", "", name), Path("run"))
    devices = load(name).learner.devices
    assert words[:2] == ["env", f"CUDA_VISIBLE_DEVICES={','.join(map(str, devices))}"]
    if len(devices) == 1:
        assert words[2].endswith("/python")
        assert words[3] == "-P"
        return
    parsed = launch_command_parser().parse_args(words[words.index("launch") + 1 :])
    assert parsed.num_processes == len(devices)
    assert (parsed.use_fsdp, int(parsed.fsdp_version)) == (True, 2)
    assert parsed.module
    assert parsed.training_script == "engine.cli"
    assert parsed.training_script_args[:2] == ["role", "learner"]


# ``launch.check_args`` for several command lines: importing vLLM costs more than all of them.
JUDGE = """
import json, sys
from engine.inference.launch import judge
found = {}
for name, words in json.load(sys.stdin).items():
    try:
        found[name] = judge("shallow", words)
    except SystemExit as error:
        found[name] = error.code
print("JUDGED", json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_vllm_accepts_the_servers_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """And refuses a flag that it does not know."""
    from engine.inference import launch

    absent = Path("a-model-that-is-not-here")
    spread = {"nnodes": 2, "node-rank": 1, "master-addr": "10.0.0.1", "tensor-parallel-size": 16}
    settings = [f"server.args.{flag}={json.dumps(value)}" for flag, value in spread.items()]
    on_cpus = {"cpu": load("nano"), "hosts": recipe.load(CONFIGS / "nano.toml", settings).config}
    cpu_lines = {name: launch.flags(one, absent, 1) for name, one in on_cpus.items()}
    monkeypatch.setattr(launch, "on_cpu", lambda: False)
    configs = {name: load(name) for name in [*GAMES, *TOOLS]}
    settings = ["server.args.max-num-sequences=3"]
    configs["wrong"] = recipe.load(CONFIGS / f"{GAMES[0]}.toml", settings).config
    lines = {name: launch.flags(one, absent, 1) for name, one in configs.items()}
    assert not any("--enforce-eager" in words for words in lines.values())
    lines |= cpu_lines
    done = subprocess.run(
        [sys.executable, "-c", JUDGE],
        input=json.dumps(lines),
        env=launch.environment(configs[GAMES[0]]),
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("JUDGED")]
    assert json.loads(found.removeprefix("JUDGED")) == {**dict.fromkeys(lines, 0), "wrong": 2}, done.stderr
    assert "max-num-sequences" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", ALL)
def test_trl_accepts_the_learners_settings(name: str, tmp_path: Path) -> None:
    from trl import GRPOConfig

    from engine.training.trainer import arguments

    loaded = load(name)
    settings = arguments(loaded.learner, tmp_path, seed=loaded.run.seed)
    assert isinstance(settings, GRPOConfig)
    assert settings.learning_rate == loaded.learner.optimizer.learning_rate
    assert settings.beta == loaded.learner.kl


def test_seven_replicas_get_seven_devices(tmp_path: Path) -> None:
    settings = ["server.count=7", "server.devices=[0,1,2,3,4,5,6]", "learner.devices=[7]"]
    made = plan.make(recipe.load(CONFIGS / "qwen3-4b-games.toml", settings).config, RunDirectory(tmp_path))
    commands = {process.name: process.command for process in made.processes}
    for index in range(7):
        assert f"CUDA_VISIBLE_DEVICES={index} " in commands[f"vllm {index}"]
        assert "VLLM_SERVER_DEV_MODE=1" in commands[f"vllm {index}"]
    assert commands["learner"].startswith("env CUDA_VISIBLE_DEVICES=7 ")


def test_the_plan_counts_the_copies_of_data_parallel_servers(tmp_path: Path) -> None:
    settings = [
        "server.count=1",
        "server.devices=[]",
        "learner.devices=[]",
        "server.args.data-parallel-size=7",
    ]
    made = plan.make(recipe.load(CONFIGS / "qwen3-4b-games.toml", settings).config, RunDirectory(tmp_path))
    server = next(process for process in made.processes if process.name == "vllm 0")
    assert server.memory_gb > 7 * 4e9 * 2 / plan.GB  # each of the seven holds the model in bfloat16


def test_the_plan_says_how_an_adopted_server_must_have_been_started(tmp_path: Path) -> None:
    adopting = recipe.load(CONFIGS / "nano.toml", ['server.urls=["http://gpu1:8123"]']).config
    made = plan.make(adopting, RunDirectory(tmp_path))
    server = next(process for process in made.processes if process.name == "vllm (adopted)")
    for part in ("VLLM_SERVER_DEV_MODE=1", "--model MODEL", "--port 8123", "--weight-transfer-config"):
        assert part in server.note
    assert "--host" not in server.note
    assert "SPADE" not in server.note  # nothing that ties its life to ours


def test_a_host_without_vllm_has_a_plan_of_servers_that_it_adopts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> bool:
        raise SpadeError("vLLM is not installed")

    monkeypatch.setattr(plan.launch, "on_cpu", missing)
    adopting = recipe.load(CONFIGS / "nano.toml", ['server.urls=["http://gpu1:8123"]']).config
    assert "docs/weights.md" in plan.render(plan.make(adopting, RunDirectory(tmp_path)))
