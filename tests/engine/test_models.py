"""Sources of a model, and the errors of models that cannot be used."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path

import pytest

from engine import models
from engine.config import Config, ModelConfig, RunConfig
from engine.errors import ConfigError, SpadeError


def config(path: str, **model) -> Config:
    return Config(run=RunConfig(name="t"), model=ModelConfig(path=path, **model))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    (directory / "model.safetensors").write_bytes(b"")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_a_directory_is_taken_as_it_is(model: Path, tmp_path: Path) -> None:
    assert models.resolve(config(str(model)), tmp_path) == model
    assert models.resolve(config("model"), tmp_path) == model


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda m: [p.unlink() for p in m.iterdir()], "no config.json"),
        (lambda m: (m / "config.json").write_text("{"), "not JSON"),
        (lambda m: (m / "model.safetensors").unlink(), "no weights"),
        (lambda m: (m / "tokenizer.json").unlink(), "no tokenizer"),
    ],
)
def test_each_fault_names_the_key_and_a_remedy(model: Path, tmp_path: Path, spoil, says: str) -> None:
    spoil(model)
    with pytest.raises(ConfigError, match=says) as caught:
        models.resolve(config(str(model)), tmp_path)
    assert str(model) in str(caught.value)
    assert "model.path" in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("path", "says", "remedy"),
    [
        ("nowhere/at/all", "is not a directory", "warmstart:"),
        ("package:no-such-package-of-spade", "not installed", "pip install"),
        ("package:msgspec", "0 GGUF files", ""),
    ],
)
def test_a_model_that_is_missing_is_refused_with_a_remedy(
    tmp_path: Path, path: str, says: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        models.resolve(config(path), tmp_path)
    assert remedy in caught.value.remedy


def test_a_context_longer_than_the_models_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len = 4096 is beyond the model's 2048"):
        models.resolve(config(str(model), max_model_len=4096), tmp_path)


def test_warmstart_is_asked_for(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("engine.nano.warmstart")
    fake.build = lambda config: model
    monkeypatch.setitem(sys.modules, "engine.nano.warmstart", fake)
    monkeypatch.setattr("engine.nano.warmstart", fake, raising=False)
    assert models.resolve(config("warmstart:"), tmp_path) == model


def test_a_package_is_unpacked_once_and_whole(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPADE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "packaged_gguf", lambda name: (tmp_path / "x.gguf", "1.2"))
    calls = []

    def unpack(source: Path, target: Path) -> None:
        calls.append(source)
        (target / "half").write_text("")
        if len(calls) == 1:
            raise SpadeError("no space")
        for file in model.iterdir():
            (target / file.name).write_bytes(file.read_bytes())

    monkeypatch.setattr(models, "_unpack", unpack)
    with pytest.raises(SpadeError, match="no space"):
        models.resolve(config("package:x"), tmp_path)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["x-1.2.lock"]
    first = models.resolve(config("package:x"), tmp_path)
    assert models.resolve(config("package:x"), tmp_path) == first == tmp_path / "cache" / "x-1.2"
    assert len(calls) == 2


def test_a_model_of_the_hub_comes_from_its_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--owner--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(model, cached / "snapshots" / ("0" * 40))
    assert models.resolve(config("hub:owner/small"), tmp_path) == cached / "snapshots" / ("0" * 40)
    for name in ("owner/other", "not a name"):
        with pytest.raises(ConfigError, match="cannot be had from the hub") as caught:
            models.resolve(config(f"hub:{name}"), tmp_path)
        assert f"hf download {name}" in caught.value.remedy
