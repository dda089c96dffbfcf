"""The trainer on TRL's seams: same loss as TRL, same gradient as a naive batch, one step a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_fakes import VOCABULARY, random_samples, sample, segment

from engine.config import LearnerConfig, OptimizerConfig, RoleTraining
from engine.errors import ConfigError, SpadeError
from engine.training.batch import Batch, Example, build, policy_rows, supervised_rows
from engine.training.samples import CreditedSample, arrays

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
ROLES: dict[Any, RoleTraining] = {"agent": RoleTraining(), "designer": RoleTraining(weight=0.7)}
SIZE = 18
APART: dict[Any, float] = {"agent": 0.6, "designer": 1.5}  # temperatures


def batch_of(
    samples: list[CreditedSample],
    examples: list[Example] | None = None,
    *,
    bound: int = 100,
    temperatures: dict[Any, float] | None = None,
) -> Batch:
    rows = policy_rows(samples, ROLES, SIZE, temperatures) + supervised_rows(examples or [], 0.1)
    return build(rows, micro_batch_tokens=bound, padding=VOCABULARY - 2)


def mixed() -> list[CreditedSample]:
    two = segment([4, 5, 6, 7], [0, 1, 1, 1]), segment([8, 9, 10], [0, 0, 1])
    return [
        *random_samples(7, seed=1),
        *random_samples(4, seed=2, role="designer"),
        sample("two-segments", segments=two, advantage=-0.5),
    ]


def load(policy: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)


def row_logps(model: Any, tokens: Any, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor(np.asarray(tokens, dtype=np.int64))[None]
    logits = model(input_ids=ids).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]


def naive_loss(
    model: Any, samples: list[CreditedSample], reference: Any, kl: float, temperatures: dict[Any, float]
) -> torch.Tensor:
    """One row at a time, no padding, no micro-batches, straight from the definition (biased KL)."""
    total = torch.zeros(())
    for one in samples:
        losses, temperature = [], temperatures.get(one.role, 1.0)
        for part in one.segments:
            tokens, mask, behaviour = arrays(part)
            logps = row_logps(model, tokens, temperature)
            with torch.no_grad():
                weight = torch.exp(logps - torch.tensor(behaviour[1:].copy())).clamp(max=2.0)
                start = row_logps(reference, tokens, temperature)
            value = -torch.exp(logps - logps.detach()) * one.credit.advantage * weight
            value = value + kl * (torch.exp(start - logps) - (start - logps) - 1)
            losses.append(value[torch.tensor(mask[1:].copy())])
        total = total + ROLES[one.role].weight * torch.cat(losses).mean() / SIZE
    return total


class Gradients:
    """Keeps the gradient that the optimiser was given."""

    def __new__(cls) -> Any:
        from transformers import TrainerCallback

        class Keeper(TrainerCallback):
            gradients: dict[str, torch.Tensor] = {}  # noqa: RUF012

            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **context: Any) -> None:
                named = context["model"].named_parameters()
                self.gradients = {name: value.grad.clone() for name, value in named}

        return Keeper()


@pytest.mark.parametrize(
    ("mode", "unbiased", "temperature"),
    [("token_truncate", True, 1.0), ("token_truncate", False, 1.0), ("token_mask", True, 1.0),
     ("sequence_truncate", True, 1.0), ("sequence_mask", True, 1.0), ("token_truncate", True, 0.6)],
)  # fmt: skip
def test_our_loss_is_trls_loss(mode: str, unbiased: bool, temperature: float, policy: Path, tmp_path: Path):
    """TRL scores four completions of one prompt; we get the same tokens, advantages and log-probs."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from engine.training.command_queue import CommandQueue
    from engine.training.trainer import GRPOConfig, GRPOTrainer
    from engine.training.trainer import build as build_ours

    chooser = np.random.default_rng(5)
    prompts = [[1, 2, 3]] * 4
    completions = [chooser.integers(0, 60, size=size).tolist() for size in (4, 6, 7, 7)]
    holes = [[1] * len(one) for one in completions]
    holes[2][3] = holes[3][0] = 0
    rewards = [1.0, 0.0, 0.25, -1.0]
    spread = 0.3 if mode.startswith("sequence") else 1.0
    logprobs = [(-4.16 + spread * chooser.normal(size=len(one))).tolist() for one in completions]

    theirs = GRPOTrainer(
        model=load(policy),
        reward_funcs=lambda **_: rewards,
        args=GRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none",
            gradient_checkpointing=False,
            loss_type="grpo", epsilon=0.2, epsilon_high=0.28, beta=0.1, scale_rewards="none",
            vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=2.0,
            use_bias_correction_kl=unbiased, temperature=temperature,
            per_device_train_batch_size=4, num_generations=4,
        ),
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        processing_class=AutoTokenizer.from_pretrained(policy),
    )  # fmt: skip
    theirs.use_vllm = True
    theirs._generate = lambda _: (prompts, completions, holes, [""] * 4, logprobs, {}, None, None)
    theirs.current_gradient_accumulation_steps = 1
    settings = LearnerConfig(kl=0.1, importance_mode=mode, trl={"use_bias_correction_kl": unbiased})  # type: ignore[arg-type]
    ours = build_ours(settings, policy, tmp_path, CommandQueue(), seed=3)
    for model in (theirs.model, ours.model):
        torch.manual_seed(11)
        model.train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))

    inputs = theirs._generate_and_score_completions([{"prompt": ""}] * 4)
    limited = inputs["importance_sampling_ratio"] == (2.0 if mode.endswith("truncate") else 0.0)
    assert limited.any()
    assert not limited.all()
    their_loss = theirs.compute_loss(theirs.model, inputs)
    their_loss.backward()
    samples = [
        sample(
            f"s{index}",
            advantage=rewards[index] - float(np.mean(rewards)),
            segments=[
                segment(
                    prompts[index] + completions[index],
                    [0, 0, 0] + holes[index],
                    [0.0, 0.0, 0.0] + logprobs[index],
                )
            ],
        )
        for index in range(4)
    ]
    rows = policy_rows(samples, ROLES, 4, {"agent": temperature})
    (micro,) = build(rows, micro_batch_tokens=1000, padding=0).micro_batches
    our_loss = ours.compute_loss(ours.model, micro)
    our_loss.backward()

    assert our_loss.item() == pytest.approx(their_loss.item(), abs=1e-6)
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)
    assert abs(their_loss.item()) > 1e-3


@pytest.mark.parametrize("temperatures", [{}, APART], ids=["plain", "tempered"])
def test_micro_batches_give_the_gradient_of_the_naive_batch(
    temperatures: dict[Any, float], start: Callable[..., Any], policy: Path
):
    keeper = Gradients()
    rate = 0.5
    learner = LearnerConfig(
        kl=0.2,
        optimizer=OptimizerConfig(learning_rate=rate, weight_decay=0.0, max_grad_norm=0.0),
        trl={"optim": "sgd", "use_bias_correction_kl": False},
    )
    model, reference = load(policy), load(policy)
    with start(learner, callbacks=(keeper,)) as running:
        for _ in range(2):  # the second step has a KL that is not zero
            before = copy.deepcopy(model.state_dict())
            batch = batch_of(mixed(), bound=64, temperatures=temperatures)
            assert len(batch.micro_batches) > 3
            values = running.step(batch)
            loss = naive_loss(model, mixed(), reference, 0.2, temperatures)
            model.zero_grad()
            loss.backward()
            assert values["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
            squares = 0.0
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(keeper.gradients[name], parameter.grad, atol=2e-5, rtol=2e-4)
                squares += float(parameter.grad.square().sum())
            assert values["grad_norm"] == pytest.approx(squares**0.5, rel=1e-3)
            model.load_state_dict(running.call(running.trainer.model.state_dict))
            name, weight = next(iter(model.named_parameters()))
            torch.testing.assert_close(weight, before[name] - rate * keeper.gradients[name])
    assert values["kl"] > 0
    assert values["micro_batches"] == len(batch.micro_batches)


def test_log_probs_are_those_of_the_temperature_that_sampled(start: Callable[..., Any], policy: Path):
    """With fresh samples of both roles, at temperatures of their own, no weight differs from 1."""
    model, fresh = load(policy), []
    for one in mixed():
        parts = []
        for part in one.segments:
            tokens, mask, _ = arrays(part)
            logps = np.append(0.0, row_logps(model, tokens, APART[one.role]).detach().numpy())
            parts.append(segment(tokens.tolist(), mask.astype(int).tolist(), np.where(mask, logps, 0.0)))
        fresh.append(sample(one.sample, role=one.role, advantage=one.credit.advantage, segments=parts))
    example = Example(np.array([5, 6, 7, 8], dtype=np.int32), np.array([False, True, True, True]))
    learner = LearnerConfig(
        kl=0.1, optimizer=OptimizerConfig(learning_rate=0.0, weight_decay=0.0), steps_per_batch=2
    )
    with start(learner) as running:
        values = running.step(batch_of(fresh, [example], temperatures=APART))
        others = running.step(batch_of(fresh, [example]))
    for role in ("agent", "designer"):
        assert values[f"ratio_mean_{role}"] == pytest.approx(1.0, abs=1e-5)
        assert values[f"behaviour_kl_{role}"] == pytest.approx(0.0, abs=1e-6)
        assert values[f"ratio_deviation_{role}"] < 1e-5 < 1e-3 < others[f"ratio_deviation_{role}"]
    assert values["loss_supervised"] == pytest.approx(-0.1 * row_logps(model, example.tokens).mean().item())
    assert values["loss_supervised"] == pytest.approx(others["loss_supervised"])


def test_one_step_moves_probability_towards_the_advantage(start: Callable[..., Any], policy: Path):
    learner = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-3), kl=0.05, precision="bf16")
    good, bad = [1, 2, 10, 11, 12], [1, 2, 20, 21, 22]
    mask, samples = [0, 0, 1, 1, 1], []
    model = load(policy)
    before = [row_logps(model, tokens)[1:].sum().item() for tokens in (good, bad)]
    for name, tokens, advantage in (("good", good, 1.0), ("bad", bad, -1.0)):
        samples.append(sample(name, advantage=advantage, segments=[segment(tokens, mask)]))
    with start(learner) as running:
        first = running.step(batch_of(samples))
        for _ in range(3):
            running.step(batch_of(samples))
        state = running.call(running.trainer.weights)
        model.load_state_dict(state, strict=False)
        history = running.trainer.state.log_history
    after = [row_logps(model, tokens)[1:].sum().item() for tokens in (good, bad)]
    assert after[0] > before[0] + 0.05
    assert after[1] < before[1] - 0.05
    assert first["ratio_mean"] == pytest.approx(1.0, abs=0.3)
    assert first["clip_fraction"] == 0.0
    assert [entry["step"] for entry in history][:4] == [1, 2, 3, 4]
    assert {"grad_norm", "kl", "entropy", "padding_waste", "loss_agent", "tokens_per_second"} <= history[
        0
    ].keys()


def test_the_supervised_mix_is_learned(start: Callable[..., Any], policy: Path):
    example = Example(np.array([5, 6, 7, 8], dtype=np.int32), np.array([False, True, True, True]))
    learner = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-3))
    with start(learner) as running:
        first = running.step(batch_of(random_samples(2, seed=1), [example]))
        second = running.step(batch_of(random_samples(2, seed=1), [example]))
    expected = -row_logps(load(policy), example.tokens).mean().item()
    assert first["loss_supervised"] == pytest.approx(0.1 * expected, rel=1e-4)
    assert second["loss_supervised"] < first["loss_supervised"]
    assert first["supervised_tokens"] == 3


def test_the_canary_is_the_log_prob_in_full_precision(start: Callable[..., Any], policy: Path):
    from engine.training.trainer import canary_tokens

    with start(LearnerConfig(precision="bf16")) as running:
        tokens = canary_tokens(running.trainer)
        assert tokens == canary_tokens(running.trainer)
        running.step(batch_of(random_samples(3, seed=4)))
        found = running.call(lambda: running.trainer.canary(tokens))
        model = load(policy)
        model.load_state_dict(running.call(running.trainer.weights), strict=False)
    assert len(tokens) == 48
    assert max(tokens) < VOCABULARY - 2
    np.testing.assert_allclose(found, row_logps(model, tokens).detach().numpy(), atol=2e-6)


def test_a_restored_trainer_goes_on_to_the_same_bits(start: Callable[..., Any], tmp_path: Path):
    learner = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-3))
    batches = [batch_of(random_samples(4, seed=seed)) for seed in range(3)]
    with start(learner) as running:
        running.step(batches[0])
        capsule = running.capture(tmp_path / "kept")
        running.step(batches[1])
        last = running.step(batches[2])
        expected = copy.deepcopy(running.call(running.trainer.weights))
    with start(learner) as running:
        running.call(lambda: running.trainer.restore(capsule, 1))
        running.step(batches[1])
        again = running.step(batches[2])
        found = running.call(running.trainer.weights)
        assert running.trainer.state.global_step == 3
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert again["loss"] == last["loss"]
    assert "lm_head.weight" not in expected


def test_a_resume_takes_the_moments_from_the_checkpoint_and_the_settings_from_the_recipe(
    start: Callable[..., Any], tmp_path: Path
):
    first, second = batch_of(random_samples(4, seed=1)), batch_of(random_samples(4, seed=2))
    with start(LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-3))) as running:
        running.step(first)
        capsule = running.capture(tmp_path / "kept")
    other = OptimizerConfig(learning_rate=5e-4, beta1=0.8, beta2=0.95, weight_decay=0.0)
    with start(LearnerConfig(optimizer=other)) as running:
        running.call(lambda: running.trainer.restore(capsule, 1))
        groups = running.trainer.optimizer.param_groups
        kept = running.capture(tmp_path / "again").extra["optimizer"]["state"]
        saved = capsule.extra["optimizer"]["state"]
        assert all(torch.equal(kept[name]["exp_avg"], saved[name]["exp_avg"]) for name in saved)
        for _ in range(2):
            assert {group["lr"] for group in groups} == {5e-4}
            assert {group["betas"] for group in groups} == {(0.8, 0.95)}
            assert {group["weight_decay"] for group in groups} == {0.0}
            assert running.step(second)["learning_rate"] == 5e-4


def test_a_checkpoint_of_another_model_is_refused(start: Callable[..., Any], tmp_path: Path):
    from engine.training.checkpoint import CheckpointTensors

    with start(LearnerConfig()) as running:
        capsule = running.capture(tmp_path / "kept")
        other = {name: tensor[:1] for name, tensor in capsule.model.items()}
        with pytest.raises(SpadeError, match="another model"):
            running.call(lambda: running.trainer.restore(CheckpointTensors(other, capsule.extra), 1))


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(start: Callable[..., Any]):
    batch = batch_of(random_samples(2, seed=1))
    batch.micro_batches[0]["advantages"][0, -3:] = float("inf")
    with start(LearnerConfig()) as running:
        before = copy.deepcopy(running.call(running.trainer.weights))
        with pytest.raises(SpadeError, match="not a finite number"):
            running.step(batch)
        found = running.trainer.weights()
        with pytest.raises(SpadeError, match="not a finite number"):
            running.call(lambda: None)
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_trl_settings_pass_through_and_ours_do_not(tmp_path: Path):
    from engine.training.trainer import arguments

    settings = arguments(LearnerConfig(trl={"adam_epsilon": 1e-6}), tmp_path, seed=1)
    assert settings.adam_epsilon == 1e-6
    for key in ("loss_type", "learning_rate"):
        with pytest.raises(ConfigError, match=key):
            arguments(LearnerConfig(trl={key: 1}), tmp_path, seed=1)
    with pytest.raises(ConfigError, match="no_such_thing"):
        arguments(LearnerConfig(trl={"no_such_thing": 1}), tmp_path, seed=1)


def test_a_model_that_is_not_there_is_a_config_error(tmp_path: Path):
    from engine.training.command_queue import CommandQueue
    from engine.training.trainer import build as build_trainer

    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_trainer(LearnerConfig(), tmp_path / "nothing", tmp_path, CommandQueue(), seed=1)


def test_padding_waste_is_the_share_of_computed_positions_without_a_token(start: Callable[..., Any]):
    batch = batch_of(random_samples(6, seed=2))
    with start(LearnerConfig()) as running:
        values = running.step(batch)
    computed = sum(micro["input_ids"].numel() for micro in batch.micro_batches)
    present = sum(int(micro["attention_mask"].sum()) for micro in batch.micro_batches)
    assert values["padding_waste"] == pytest.approx(1 - present / computed)
    assert 0 < values["padding_waste"] < 0.5


def test_gradient_checkpointing_changes_no_number(start: Callable[..., Any]):
    found = []
    for checkpointing in (False, True):
        with start(LearnerConfig(gradient_checkpointing=checkpointing)) as running:
            running.step(batch_of(mixed()))
            found.append(running.step(batch_of(mixed())))
            assert running.trainer.model.is_gradient_checkpointing is checkpointing
    for name in ("loss", "grad_norm", "entropy"):
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-6)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from engine.checks import settings as checks
    from engine.training.trainer import arguments

    monkeypatch.setattr(checks, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="bitsandbytes") as caught:
        checks.require_packages(LearnerConfig(optimizer=OptimizerConfig(kind="paged_adamw_8bit")))
    assert "pip install bitsandbytes" in caught.value.remedy
    checks.require_packages(LearnerConfig())
    eight = arguments(LearnerConfig(optimizer=OptimizerConfig(kind="adamw_8bit")), tmp_path, seed=1)
    assert eight.optim == "adamw_bnb_8bit"
    with pytest.raises(ConfigError, match="optim"):
        arguments(
            LearnerConfig(optimizer=OptimizerConfig(kind="adamw_8bit"), trl={"optim": "sgd"}),
            tmp_path,
            seed=1,
        )


def test_a_launch_that_accelerate_does_not_follow_is_refused(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On the CPU it would take whole weights, and say nothing."""
    from engine.training.command_queue import CommandQueue
    from engine.training.ranks import Ranks
    from engine.training.trainer import build as build_trainer

    with pytest.raises(ConfigError, match="launched on 2 processes, and accelerate works with 1"):
        build_trainer(LearnerConfig(), policy, tmp_path, CommandQueue(), seed=1, ranks=Ranks(0, 2))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="asks for FSDP2"):
        build_trainer(LearnerConfig(), policy, tmp_path, CommandQueue(), seed=1)


def test_one_process_that_sees_eight_devices_trains_on_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Transformers would spread the model over all of them (nn.DataParallel)."""
    from engine.training.trainer import arguments

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    settings = arguments(LearnerConfig(), tmp_path, seed=1)
    assert (str(settings.device), settings.n_gpu) == ("cuda:0", 1)
