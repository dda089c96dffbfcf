"""Setup: a complete lock, no CUDA build by accident, nothing done twice, and errors with a remedy."""

from __future__ import annotations

import importlib.util
import json
import re
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton", "llm", "llama-cpp-python"}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The setup script, pointed at an empty project."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "requirements" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "stamp.json")
    lock = tmp_path / "cpu.lock"
    lock.write_text("a==1\nb==2\n")
    monkeypatch.setattr(module, "LOCK", lock)
    benchmarks = tmp_path / "evals.lock"
    benchmarks.write_text("c==1\n")
    monkeypatch.setattr(module, "BENCHMARKS", benchmarks)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n[tool.ruff]\nline-length = 100\n")
    return module


class Installer:
    """Notes what it is asked for; refuses what ``fails`` names."""

    asked: list[tuple[str, ...]]
    fails = ""

    def __init__(self, *, uv: bool) -> None:
        self.uv = uv

    def install(self, *arguments: str) -> bool:
        Installer.asked.append(arguments)
        return not (Installer.fails and Installer.fails in " ".join(arguments))


@pytest.fixture
def installed(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``install`` with an installer that installs nothing, and an environment that is there."""
    Installer.asked, Installer.fails = [], ""
    monkeypatch.setattr(install, "Installer", Installer)
    monkeypatch.setattr(
        install, "make_venv", lambda *_: (install.VENV / "bin").mkdir(parents=True, exist_ok=True)
    )
    (install.VENV / "bin").mkdir(parents=True)
    (install.VENV / "bin" / "spade").touch()
    return install


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonical(pin.name): pin for pin in found}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_pin_is_exact() -> None:
    for pin in pins().values():
        assert re.fullmatch(r"==[^*]+", str(pin.specifier)), pin


def test_the_lock_holds_all_that_the_project_and_its_packages_need() -> None:
    locked = pins()
    missing = set()
    here = [name for name, pin in locked.items() if pin.marker is None or pin.marker.evaluate()]
    for name in ("spade-selfplay", *here):
        for text in metadata.requires(name) or []:
            need = Requirement(text)
            if need.marker is not None and not need.marker.evaluate({"extra": ""}):
                continue
            found = canonical(need.name)
            if found in locked:
                pin = str(locked[found].specifier)[2:]
                assert need.specifier.contains(pin, prereleases=True), (name, text)
            elif found != "torch":
                missing.add(found)
    assert missing <= LEFT_OUT


def test_the_lock_is_what_is_installed_here() -> None:
    for name, pin in pins().items():
        if pin.marker is None or pin.marker.evaluate():
            assert metadata.version(name) == str(pin.specifier)[2:]
    assert LEFT_OUT.isdisjoint(pins())
    assert metadata.version("torch").endswith("+cpu")


def test_a_cuda_build_is_no_answer_to_what_is_asked_for(install: ModuleType) -> None:
    wanted = SpecifierSet(install.TORCH.removeprefix("torch"))
    assert "2.13.0+cpu" in wanted
    for build in ("2.13.0", "2.13.0+cu129", "2.13.1+cpu"):
        assert build not in wanted


def test_without_a_cpu_build_setup_says_so_and_stops(installed: ModuleType) -> None:
    Installer.fails = "torch"
    with pytest.raises(installed.SetupError, match="TORCH_INDEX=URL"):
        installed.setup(uv=False, torch_index="")
    assert Installer.asked == [(installed.TORCH,)]
    assert not installed.STAMP.exists()


def test_a_named_index_is_asked_for_torch_alone(installed: ModuleType) -> None:
    installed.setup(uv=False, torch_index="http://localhost/cpu")
    assert Installer.asked[0] == (installed.TORCH, "--index-url", "http://localhost/cpu")
    assert all("--index-url" not in asked for asked in Installer.asked[1:])


def test_setup_repeats_only_what_has_changed(installed: ModuleType) -> None:
    def asked() -> list[str]:
        Installer.asked.clear()
        installed.setup(uv=False, torch_index="")
        return [words[0] for words in Installer.asked]

    benchmarks = ["--requirement", installed.BUILT]
    assert asked() == [installed.TORCH, "--requirement", *benchmarks, "--no-build-isolation"]
    assert asked() == []
    installed.LOCK.write_text("a==2\n")
    assert asked() == ["--requirement", "--no-build-isolation"]
    installed.BENCHMARKS.write_text("c==2\n")
    assert asked() == [*benchmarks, "--no-build-isolation"]
    project = installed.ROOT / "pyproject.toml"
    project.write_text(project.read_text().replace("100", "110"))
    assert asked() == []
    project.write_text(project.read_text().replace("'x'", "'y'"))
    assert asked() == ["--no-build-isolation"]


def test_what_was_interrupted_is_done_again(installed: ModuleType) -> None:
    Installer.fails = "--requirement"
    with pytest.raises(installed.SetupError, match="goes on from where it stopped"):
        installed.setup(uv=False, torch_index="")
    assert not installed.STAMP.exists()
    Installer.fails = ""
    installed.setup(uv=False, torch_index="")
    assert json.loads(installed.STAMP.read_text())["torch"] == installed.TORCH


@pytest.mark.parametrize("missing", ["evals.lock", "pycosat"])
def test_setup_goes_on_without_benchmarks(
    installed: ModuleType, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Installer.fails = missing
    installed.setup(uv=False, torch_index="")
    assert "what each suite lacks" in capsys.readouterr().out
    assert installed.STAMP.exists()


def test_uv_is_used_when_asked_for_only(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install.Installer(uv=False).command[1:4] == ["-m", "pip", "install"]
    monkeypatch.setattr(install.shutil, "which", lambda _: None)
    with pytest.raises(install.SetupError, match="uv was asked for"):
        install.Installer(uv=True)


def test_an_old_python_is_refused(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sys, "version_info", (3, 10, 0))
    monkeypatch.setattr(install.shutil, "which", lambda _: None)
    with pytest.raises(install.SetupError, match="make setup PYTHON="):
        install.interpreter()
