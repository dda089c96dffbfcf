"""What a checkpoint keeps of ZeRO's optimiser, on a stand-in; test_ranks.py has the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config import LearnerConfig
from engine.errors import ConfigError, SpadeError
from engine.training import extras, zero
from engine.training.parameters import optimizer_state

RANKS = 3


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))


def make_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    bias = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    rest = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    return [{"params": rest, "weight_decay": 0.1}, {"params": bias, "weight_decay": 0.0}]


def make_rank(
    model: torch.nn.Module, rank: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> Any:
    """The optimiser of one rank: per group a stretch of float32, and where each parameter lies in it."""
    groups, stretches = [], []
    for group in make_groups(model):
        length = -(-sum(parameter.numel() for parameter in group["params"]) // RANKS)
        begin, end, at = rank * length, (rank + 1) * length, 0
        stretches.append(torch.zeros(length))
        for parameter in group["params"]:
            first, last = max(at, begin), min(at + parameter.numel(), end)
            parameter._hp_mapping = None
            if first < last:
                parameter._hp_mapping = SimpleNamespace(
                    lp_fragment_address=SimpleNamespace(start=first - at, numel=last - first),
                    hp_fragment_address=SimpleNamespace(start=first - begin, numel=last - first),
                )
            at += parameter.numel()
        groups.append({**group, "params": [stretches[-1]]})
    base = kind(groups, lr=1e-2)
    held = SimpleNamespace(
        optimizer=base,
        bit16_groups=[group["params"] for group in make_groups(model)],
        single_partition_of_fp32_groups=stretches,
    )
    return SimpleNamespace(optimizer=held)


def summed(parts: list[Any]) -> Any:
    """What `all_reduce` would have given: each rank has its own numbers and zeros."""
    if isinstance(parts[0], dict):
        return {key: summed([part[key] for part in parts]) for key in parts[0]}
    return torch.stack(parts).sum(0)


@pytest.fixture(autouse=True)
def _no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero.dist, "all_reduce", lambda _: None)


@pytest.fixture
def trained() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model after two steps of one process, and the state of its optimiser."""
    model = make_model()
    optimizer = torch.optim.AdamW(make_groups(model), lr=1e-2)
    for _ in range(2):
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer_state(model, optimizer)


def test_what_ranks_restore_and_keep_is_what_one_process_kept(
    trained: tuple[torch.nn.Module, dict[str, Any]],
):
    model, saved = trained
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    states, masters = [], []
    for rank in range(RANKS):
        half = make_model().bfloat16()
        optimizer = make_rank(half, rank)
        zero.restore(half, optimizer, weights, saved)
        state = zero.optimizer_state(half, optimizer, keep=True)
        assert state is not None
        assert state["kind"] == saved["kind"]
        assert state["groups"] == saved["groups"]
        counts = [values.pop("step") for values in state["state"].values()]
        assert counts == [2] * len(saved["state"])
        assert len({count.data_ptr() for count in counts}) == len(counts)
        states.append(state["state"])
        masters.append(zero.masters(half, optimizer, keep=True))
    for name, values in summed(states).items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(values[key], saved["state"][name][key])
            assert all((one[name][key] == 0).any() for one in states)
    for name, tensor in summed(masters).items():
        assert torch.equal(tensor, weights[name])
        assert tensor.dtype == torch.float32


def test_float32_weights_are_their_own_masters():
    model = make_model()
    assert zero.masters(model, make_rank(model, 0), keep=True) == {}


def test_a_rank_that_keeps_nothing_gets_nothing(trained: tuple[torch.nn.Module, dict[str, Any]]):
    model, saved = trained
    optimizer = make_rank(model, 1)
    zero.restore(model, optimizer, dict(model.named_parameters()), saved)
    state = zero.optimizer_state(model, optimizer, keep=False)
    assert state is not None
    assert all(values["exp_avg"].numel() == 0 for values in state["state"].values())


def test_before_the_first_step_there_is_no_state():
    model = make_model()
    optimizer = make_rank(model, 0)
    state = zero.optimizer_state(model, optimizer, keep=True)
    assert state is not None
    assert state["state"] == {}
    zero.restore(model, optimizer, dict(model.named_parameters()), state)
    assert zero.optimizer_state(model, optimizer, keep=True) == state


def test_moments_in_blocks_begin_anew(trained: tuple[torch.nn.Module, dict[str, Any]]):
    model, saved = trained
    optimizer = make_rank(model, 0)
    zero.restore(model, optimizer, dict(model.named_parameters()), saved)
    for values in optimizer.optimizer.optimizer.state.values():
        values["absmax"] = torch.zeros(1)
    assert zero.optimizer_state(model, optimizer, keep=True) is None
    zero.restore(model, optimizer, dict(model.named_parameters()), None)


def test_the_state_of_another_optimiser_is_refused(trained: tuple[torch.nn.Module, dict[str, Any]]):
    model, saved = trained
    with pytest.raises(SpadeError, match="state of AdamW, this run has SGD"):
        zero.restore(model, make_rank(model, 0, torch.optim.SGD), dict(model.named_parameters()), saved)


@pytest.mark.parametrize(
    ("stage", "remedy"), [(0, "torchrun"), (1, None), (2, None), (3, "FSDP2")], ids=lambda value: str(value)
)
def test_stages_that_do_not_work_are_refused(stage: int, remedy: str | None):
    plugin = SimpleNamespace(zero_stage=stage)
    if remedy is None:
        zero.require_stage(plugin)
        return
    with pytest.raises(ConfigError, match=remedy):
        zero.require_stage(plugin)


def make_plugin(stage: int = 2, **values: str) -> Any:
    config = SimpleNamespace(mismatches=[])
    return SimpleNamespace(hf_ds_config=config, zero_stage=stage, get_value=values.get)


def test_a_launch_that_contradicts_the_recipe_is_refused():
    plugin = make_plugin()
    zero.require_agreement(plugin)
    plugin.hf_ds_config.mismatches.append("- ds bf16.enabled=True vs hf bf16=False")
    with pytest.raises(ConfigError, match=r"bf16\.enabled=True vs hf"):
        zero.require_agreement(plugin)


def test_an_optimiser_whose_parts_lie_otherwise_is_refused():
    types = {"data_types.grad_accum_dtype": "fp32"}
    zero.require_agreement(make_plugin(2, **types))
    with pytest.raises(ConfigError, match="take stage 2"):
        zero.require_agreement(make_plugin(1, **types))


def test_deepspeed_that_is_not_installed_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zero, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install deepspeed"):
        zero.prepare()
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs the package deepspeed"):
        extras.require(LearnerConfig(launch=("accelerate", "launch", "--use_deepspeed")))


@pytest.mark.parametrize(("flag", "asked"), [("true", True), ("True", True), ("false", False), ("", False)])
def test_the_launcher_tells_by_the_environment(flag: str, asked: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", flag)
    assert zero.launched() == asked
