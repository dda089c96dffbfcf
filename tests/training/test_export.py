"""A checkpoint as a plain Hugging Face folder: transformers loads it, and its logits are the trainer's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_fakes import VOCABULARY, random_samples

from engine import recipe
from engine.commands.export import export as command
from engine.config import (
    Config,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RoleTraining,
    RunConfig,
)
from engine.errors import ConfigError, SpadeError
from engine.lineage import Version
from engine.training.batch import Batch, build, policy_rows
from engine.training.checkpoint import LearnerState, begin, newest
from engine.training.retention import Best, write_best

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
IDS = torch.tensor([[3, 9, 27, 17, 51, 29]])
LORA = LoraConfig(rank=4, alpha=8.0)


def batch(seed: int) -> Batch:
    rows = policy_rows(random_samples(6, seed=seed), {"agent": RoleTraining()}, 6)
    return build(rows, micro_batch_tokens=100, padding=VOCABULARY - 2)


def learner(**settings: Any) -> LearnerConfig:
    return LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0), **settings)


@pytest.fixture
def export() -> Any:
    """The module, which imports transformers: not when tests are collected."""
    from engine.training import export

    return export


@pytest.fixture
def base(policy: Path, tmp_path: Path) -> Path:
    """The starting model of a run, with a chat template and a generation configuration of its own."""
    from transformers import AutoTokenizer, GenerationConfig

    target = tmp_path / "base"
    shutil.copytree(policy, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(target)
    GenerationConfig(eos_token_id=VOCABULARY - 1, top_k=7, do_sample=True).save_pretrained(target)
    (target / "supervised.jsonl").write_text("{}\n")
    return target


@pytest.fixture
def trained(start: Callable[..., Any], base: Path, tmp_path: Path) -> Callable[[LearnerConfig], torch.Tensor]:
    """``trained(settings)`` makes a run with checkpoints at steps 1 and 2; returns the logits at 2."""

    def train(settings: LearnerConfig) -> torch.Tensor:
        home = tmp_path / "runs" / "mine"
        checkpoints = home / "learner" / "checkpoints"
        with start(settings) as running:
            for step in (1, 2):
                running.step(batch(step))
                state = LearnerState(version=Version(0, step), cursor=step)
                write = running.trainer.write_checkpoint
                running.call(lambda state=state, write=write: begin(checkpoints, state, write, keep=3))()
            with torch.no_grad():
                logits: torch.Tensor = running.trainer.model.eval()(input_ids=IDS).logits
        config = Config(run=RunConfig(name="mine"), model=ModelConfig(path=str(base)), learner=settings)
        (home / "config.toml").write_text(recipe.dump(config))
        (home / "model.path").write_text(str(base))
        return logits

    return train


def logits_of(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")(
            input_ids=IDS
        ).logits
    return logits


def run_export(tmp_path: Path, to: str, **options: Any) -> Path:
    defaults = {"checkpoint": "last", "dtype": "", "directory": tmp_path / "runs", "restart": None}
    command("mine", tmp_path / to, **{**defaults, **options})  # type: ignore[arg-type]
    return tmp_path / to


def test_the_logits_of_the_folder_are_those_of_the_trainer(
    trained: Callable[[LearnerConfig], torch.Tensor],
    export: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    from transformers import AutoTokenizer, GenerationConfig

    expected = trained(learner())
    monkeypatch.setattr(export, "SHARD", "60KB")
    folder = run_export(tmp_path, "out/model")
    assert torch.equal(logits_of(folder), expected)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert AutoTokenizer.from_pretrained(folder).chat_template.startswith("{% for m in messages")
    assert GenerationConfig.from_pretrained(folder).top_k == 7
    assert not (folder / "supervised.jsonl").exists(), "texts of the warm start are no part of a model"
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# mine" in card
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    first = logits_of(run_export(tmp_path, "first", checkpoint="1"))
    assert not torch.allclose(first, expected, atol=1e-4)
    half = run_export(tmp_path, "half", dtype="bfloat16")
    assert logits_of(half).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="not empty"):
        run_export(tmp_path, "half")


@pytest.mark.parametrize(
    "settings",
    ['{"temperature": 0.6, "top_p": 0.9}', '{"do_sample": false, "top_k": 20}', '{"temperature": 1e-06}'],
)
def test_generation_settings_that_transformers_refuses_to_write_are_copied(
    trained: Callable[[LearnerConfig], torch.Tensor], base: Path, tmp_path: Path, settings: str
):
    """Sampling settings without ``do_sample``: transformers 5 reads such files and refuses to write them."""
    (base / "generation_config.json").write_text(settings)
    expected = trained(learner())
    folder = run_export(tmp_path, "out/model")
    assert (folder / "generation_config.json").read_text() == settings
    assert torch.equal(logits_of(folder), expected)


def test_which_checkpoint(trained: Callable[[LearnerConfig], torch.Tensor], export: Any, tmp_path: Path):
    trained(learner())
    place = tmp_path / "runs" / "mine" / "learner" / "checkpoints"
    assert export.choose(place, "last").state.version == Version(0, 2)
    assert export.choose(place, "1").state.version == Version(0, 1)
    with pytest.raises(ConfigError, match="known to be the best"):
        export.choose(place, "best")
    write_best(place, Best(export.choose(place, "1").path.name, 0.5, "mid"))
    assert export.choose(place, "best").state.version == Version(0, 1)
    for wrong in ("7", "newest", "-1"):
        with pytest.raises(SpadeError, match="no checkpoint") as caught:
            export.choose(place, wrong)
        assert "1, 2" in caught.value.remedy
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        export.choose(tmp_path / "nothing", "last")
    with pytest.raises(SpadeError, match="no usable checkpoint"):
        export.load(tmp_path)


@pytest.mark.slow
def test_a_checkpoint_begins_another_run(
    trained: Callable[[LearnerConfig], torch.Tensor], export: Any, tmp_path: Path
):
    expected = trained(learner())
    source = export.choose(tmp_path / "runs" / "mine" / "learner" / "checkpoints", "last")
    other = tmp_path / "runs" / "other"
    command(
        str(source.path), other / "start", "last", "", tmp_path, restart=other / "learner" / "checkpoints"
    )
    assert torch.equal(logits_of(other / "start"), expected)
    found = newest(other / "learner" / "checkpoints")
    assert found is not None
    assert found.state == LearnerState()
    ours, theirs = found.tensors(), source.tensors()
    assert ours.extra["optimizer"]["groups"] == theirs.extra["optimizer"]["groups"]
    assert all(torch.equal(ours.model[name], tensor) for name, tensor in theirs.model.items())


@pytest.mark.slow
def test_adapters_are_merged_into_the_folder(
    trained: Callable[[LearnerConfig], torch.Tensor], tmp_path: Path
):
    expected = trained(learner(lora=LORA))
    folder = run_export(tmp_path, "out")
    torch.testing.assert_close(logits_of(folder), expected, atol=1e-5, rtol=0)
    assert not torch.allclose(logits_of(tmp_path / "base"), expected, atol=1e-3)
    other = tmp_path / "runs" / "other"
    run_export(tmp_path, "runs/other/start", restart=other / "learner" / "checkpoints")
    assert not (other / "start").exists(), "a run with adapters starts from the same weights"


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_a_run_prepares_to_begin_at_a_checkpoint(
    trained: Callable[[LearnerConfig], torch.Tensor], export: Any, tmp_path: Path
):
    """As `spade run --resume CHECKPOINT` does it: in a process of its own, twice if the first was cut off."""
    from engine.run import RunDirectory
    from engine.running.preflight import prepare_restart

    expected = trained(learner())
    source = export.choose(tmp_path / "runs" / "mine" / "learner" / "checkpoints", "last").path
    directory = RunDirectory(tmp_path / "runs" / "other")
    directory.logs.mkdir(parents=True)
    (directory.root / "start").mkdir()
    (directory.root / "start" / "half.safetensors").write_text("of an earlier attempt")
    said: list[str] = []
    model = await prepare_restart(source, directory, said.append)
    assert model == directory.root / "start"
    assert torch.equal(logits_of(model), expected)
    found = newest(directory.root / "learner" / "checkpoints")
    assert found is not None
    assert found.state == LearnerState()
    assert said[0] == f"Starting from {source}"
