"""TRL's ``GRPOTrainer``, fed with batches that were sampled elsewhere.

What is TRL's and transformers': the training loop, optimiser, scheduler, gradient clipping, autocast and
device placement through accelerate, the fused log-prob head, the reference model, the reporters. What is
ours: where batches come from, how they are cut into micro-batches, and the loss (``engine.training.loss``),
because a sample's token mean may run over several rows and the weight behaviour -> current needs no second
forward pass when one batch makes one step.

Supported: one process on one device (CPU or GPU), full-parameter training. Several ranks need the batch
broadcast from the rank on the bus and sharded checkpoints; the role refuses to start as one of several.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging

from engine.config import Learner
from engine.errors import ConfigError, SpadeError
from engine.training.batch import Batch, MicroBatch
from engine.training.capsule import Capsule
from engine.training.feed import Closed, Feed
from engine.training.loss import SUMS, Objective, metrics, objective_loss

# TRL's own vLLM client stays unused, so the range of versions it was tested with does not matter.
warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")

from trl import GRPOConfig, GRPOTrainer  # noqa: E402

_ENDLESS = 2**31 - 1
_HISTORY = 1000
_LOSS_SETTINGS = frozenset(
    {
        "loss_type",
        "epsilon",
        "epsilon_high",
        "delta",
        "importance_sampling_level",
        "scale_rewards",
        "entropy_coef",
        "top_entropy_quantile",
        "use_adaptive_entropy",
        "off_policy_mask_threshold",
        "num_iterations",
        "steps_per_generation",
        "generation_batch_size",
        "gradient_accumulation_steps",
        "use_vllm",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
    }
)


class PolicyTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL ships no types
    """Takes one optimiser step for every batch that its feed hands out.

    Seams of TRL 1.16 and transformers that this class stands on: the overridden methods below,
    ``_get_per_token_logps_and_entropies`` and ``_metrics``.
    """

    def __init__(self, *, feed: Feed, objective: Objective, **arguments: Any) -> None:
        self._feed = feed
        self._objective = objective
        self.control: Any = None
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64)
        # The constructor wants prompts to generate from; here all rows come from the feed.
        super().__init__(train_dataset=Dataset.from_dict({"prompt": [""]}), **arguments)

    def run(self) -> None:
        """Serve the feed until it is closed. Raises what a step raised."""
        try:
            self.train()
        except Closed:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)

    def get_train_dataloader(self) -> Feed:
        return self._feed

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Batch], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Accumulate the gradients of all micro-batches of one batch. Returns its loss."""
        batch = inputs["batch"]
        started = time.perf_counter()
        # TRL counts micro-batches of a fixed number a step; ours differ from batch to batch.
        self._step, self.current_gradient_accumulation_steps = 0, len(batch.micro_batches)
        self._sums.zero_()
        total = torch.zeros((), device=self.accelerator.device)
        for index, micro in enumerate(batch.micro_batches, start=1):
            last = index == len(batch.micro_batches)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                total += super().training_step(model, micro, num_items_in_batch)
        if not torch.isfinite(total):
            raise SpadeError(
                f"The loss of step {self.state.global_step + 1} is not a finite number",
                remedy="Lower learner.optimizer.learning_rate, or set learner.precision = 'fp32'.",
            )
        self._report(batch, time.perf_counter() - started)
        return total

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """Return the loss of one micro-batch; the sum over the micro-batches is the loss of the step."""
        logps, entropies = self._log_probs(model, inputs)
        reference = None
        if self.ref_model is not None:
            with torch.no_grad():
                reference, _ = self._log_probs(self.ref_model, inputs)
        loss, sums = objective_loss(inputs, logps, entropies, self._objective, reference=reference)
        self._sums += sums.to(self._sums.device)
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, each shared tensor once (a tied head is left out), detached."""
        seen: set[int] = set()
        state: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                state[name] = tensor.detach()
        return state

    @torch.no_grad()
    def canary(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs of ``tokens[1:]`` given their prefix, float32 (T - 1,), without autocast."""
        ids = torch.tensor([list(tokens)], device=self.accelerator.device)
        training = self.model.training
        self.model.eval()
        # The class's own forward: the instance's is wrapped in autocast by accelerate.
        logits = type(self.model).forward(self.model, input_ids=ids, use_cache=False).logits[0, :-1]
        self.model.train(training)
        logps = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
        return logps.cpu().numpy().astype(np.float32)

    def capture(self) -> Capsule:
        """Return the tensors of a checkpoint (views, valid until the next step)."""
        generators: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
        }
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state_all()
        return Capsule(self.weights(), {"optimizer": self.optimizer.state_dict(), "generators": generators})

    def restore(self, capsule: Capsule, step: int) -> None:
        """Put back what :meth:`capture` returned at ``step``. Raises SpadeError when it does not fit."""
        own = self.weights()
        if own.keys() != capsule.model.keys() or any(
            own[name].shape != tensor.shape for name, tensor in capsule.model.items()
        ):
            raise SpadeError(
                "The checkpoint belongs to another model",
                remedy="Give the run another name, or go back to the model it was started with.",
            )
        with torch.no_grad():
            for name, tensor in capsule.model.items():
                own[name].copy_(tensor)
        self.optimizer.load_state_dict(capsule.extra["optimizer"])
        generators = capsule.extra["generators"]
        torch.set_rng_state(generators["torch"])
        random.setstate(generators["python"])
        if "cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(generators["cuda"])
        self.state.global_step = self._globalstep_last_logged = step

    def _log_probs(self, model: torch.nn.Module, inputs: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = inputs["input_ids"]
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            model, ids, inputs["attention_mask"], ids.size(1) - 1, compute_entropy=model is not self.ref_model
        )
        return logps, entropies

    def _prepare_inputs(self, generation_batch: MicroBatch) -> MicroBatch:
        return {name: tensor.to(self.accelerator.device) for name, tensor in generation_batch.items()}

    def _send_telemetry(self) -> None:
        """A run does not call home."""

    def _report(self, batch: Batch, seconds: float) -> None:
        values = metrics(self._sums.tolist()) | {
            "padding_waste": batch.waste,
            "micro_batches": float(len(batch.micro_batches)),
            "tokens_per_second": batch.tokens / seconds,
        }
        for name, value in values.items():
            if name != "loss":
                self._metrics["train"][name].append(value)
        self._feed.finish(values)


class _Watch(TrainerCallback):  # type: ignore[misc]  # transformers is imported without types
    """Refuses a broken gradient, and completes the metrics of a step with what the loop logged."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        gradients = (parameter.grad for parameter in context["model"].parameters())
        if not all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None):
            raise SpadeError(
                f"The gradient of step {state.global_step + 1} is not finite",
                remedy="Lower learner.optimizer.learning_rate, or set learner.precision = 'fp32'.",
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **context: Any) -> None:
        del state.log_history[:-_HISTORY]  # it would grow for as long as the run lasts
        self._feed.complete(
            {name: float(logs[name]) for name in ("grad_norm", "learning_rate") if name in logs}
        )


def arguments(learner: Learner, output: Path, *, seed: int) -> GRPOConfig:
    """Return TRL's configuration for ``learner``; ``learner.trl`` adds what ours does not name.

    Raises ConfigError for a key of ``learner.trl`` that we set, that our loss would not heed, or that TRL
    does not know.
    """
    optimizer = learner.optimizer
    ours: dict[str, Any] = {
        "output_dir": str(output),
        "use_cpu": not torch.cuda.is_available(),
        "bf16": learner.precision == "bf16",
        "gradient_checkpointing": learner.gradient_checkpointing,
        "learning_rate": optimizer.learning_rate,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "lr_scheduler_type": "constant",
        "beta": learner.kl,
        "max_steps": _ENDLESS,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "temperature": 1.0,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": list(learner.report_to) or "none",
        "seed": seed,
    }
    refused = sorted(learner.trl.keys() & (ours.keys() | _LOSS_SETTINGS))
    if refused:
        raise ConfigError(
            f"learner.trl may not set {', '.join(refused)}",
            remedy="Use the settings of [learner]; the loss is computed from them.",
        )
    try:
        return GRPOConfig(**ours, **learner.trl)
    except TypeError as error:
        raise ConfigError(f"learner.trl: {error}", remedy="Use fields of trl.GRPOConfig.") from error


def build(learner: Learner, model: Path, output: Path, feed: Feed, *, seed: int) -> PolicyTrainer:
    """Load the policy in ``model`` (a Hugging Face directory, weights in float32) and its trainer.

    Raises ConfigError when the model cannot be loaded.
    """
    transformers_logging.disable_progress_bar()
    settings = arguments(learner, output, seed=seed)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        policy = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=learner.attention, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"The policy cannot be loaded: {error}", where=str(model)) from error
    trainer = PolicyTrainer(
        feed=feed,
        objective=Objective.of(learner),
        model=policy,
        reward_funcs=_no_reward,
        args=settings,
        processing_class=tokenizer,
        callbacks=[_Watch(feed)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _no_reward(**_: Any) -> list[float]:
    """Fill the place of a reward function, which TRL demands: advantages come with the samples."""
    raise RuntimeError("the learner scores nothing")


def padding_id(trainer: PolicyTrainer) -> int:
    """Return the token id that fills up rows."""
    return int(trainer.processing_class.pad_token_id)


def canary_tokens(trainer: PolicyTrainer, *, length: int = 48) -> tuple[int, ...]:
    """Return ``length`` ordinary token ids that depend on the vocabulary only."""
    special = {*trainer.processing_class.all_special_ids, padding_id(trainer)}
    size = trainer.model.get_input_embeddings().num_embeddings
    ordinary = [token for token in range(min(size, len(trainer.processing_class))) if token not in special]
    return tuple(random.Random("canary").choices(ordinary, k=length))
