"""TRL's ``GRPOTrainer``, fed with batches that were sampled elsewhere.

TRL and transformers provide the training loop, optimiser, scheduler, gradient clipping, autocast and device
placement through accelerate, the fused log-prob head, the reference model and the reporters. The source of
batches, their division into micro-batches and the loss (``engine.training.loss``) are ours, because a
sample's token mean may run over several rows, and the weight behaviour -> current needs no second forward
pass when one batch makes one step. When it makes several, the log-probs at its start (the proximal policy's)
are those of the first step's own forward pass, and only rows that this step leaves out take one more.

On several ranks each computes its share of a batch (``engine.training.ranks``) with whole weights (DDP) or
sharded ones (FSDP2), as the launch says. Methods that need all ranks are called by name on the others, too
(``engine.training.rank_worker``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import time
import types
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from numpy.typing import NDArray
from transformers import utils as transformers_utils
from transformers.utils import logging as transformers_logging
from trl import import_utils as trl_imports

from engine import malloc
from engine.config import LearnerConfig
from engine.errors import ConfigError, SpadeError
from engine.training import checkpoint, lora
from engine.training.background import Background
from engine.training.batch import Batch, MicroBatch
from engine.training.checkpoint import CheckpointTensors
from engine.training.command_queue import Closed, CommandQueue, RankCommands
from engine.training.loss import SUMS, Objective, metrics, objective_loss
from engine.training.parameters import (
    copied,
    in_files,
    is_sharded,
    kept,
    local,
    merged,
    optimizer_state,
    published,
    put,
    restore_optimizer,
    whole,
)
from engine.training.ranks import Ranks
from engine.training.router_replay import RouterReplay, routes_of
from engine.weights import tensor_file

# Parts that stay unused would import scikit-learn, scipy (half a second) and vLLM (seconds, 180 MB).
transformers_utils.is_sklearn_available = transformers_utils.is_scipy_available = lambda: False
trl_imports.is_vllm_available = lambda min_version=None: False

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer import grpo_trainer  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from engine.training import sharding  # noqa: E402

grpo_trainer.prepare_fsdp = sharding.shard_reference

_log = structlog.get_logger()
_ENDLESS = 2**31 - 1
_NOISE = re.compile(r"dropout|pdrop|layerdrop|jitter_noise")
_HISTORY = 1000
_OPTIMIZERS = {"adamw_8bit": "adamw_bnb_8bit", "paged_adamw_8bit": "paged_adamw_8bit"}
_LOSS_SETTINGS = frozenset(
    {
        "loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level", "scale_rewards",
        "entropy_coef", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
        "mask_truncated_completions", "multi_objective_aggregation", "reward_weights", "router_aux_loss_coef",
        "sapo_temperature_neg", "sapo_temperature_pos", "top_entropy_quantile", "use_adaptive_entropy",
        "off_policy_mask_threshold", "num_iterations", "steps_per_generation", "generation_batch_size",
        "gradient_accumulation_steps", "use_vllm", "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg",
        "vespo_lambda_pos", "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
    }
)  # fmt: skip


class PolicyTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL ships no types
    """Takes one optimiser step for every part of a batch that its feed hands out.

    Seams of TRL 1.16 and transformers that this class stands on: the overridden methods below,
    ``_get_per_token_logps_and_entropies``, ``add_fused_lm_head`` and ``_metrics``.
    """

    def __init__(
        self,
        *,
        feed: CommandQueue | RankCommands,
        objective: Objective,
        ranks: Ranks | None = None,
        **arguments: Any,
    ) -> None:
        self._feed = feed
        self._ranks = ranks or Ranks()
        self._objective = objective
        self.control: Any = None
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64)
        self._started = 0.0
        self._logps = torch.zeros(())
        # The constructor wants prompts to generate from; here all rows come from the feed.
        super().__init__(train_dataset=Dataset.from_dict({"prompt": [""]}), **arguments)
        for model in (self.model, self.ref_model):
            if model is not None:
                model = model.get_base_model() if is_peft_model(model) else model
                _take_temperature(model, in_fp32=self.args.cast_lm_head_to_fp32)
        self._replay: RouterReplay | None = None
        self._writers: list[Background] = []

    def replay_routing(self) -> None:
        """Train through the experts in the batches from now on. Raises ConfigError for a dense model."""
        routes_of(self.model)
        self._replay = RouterReplay()
        for model in (self.model, self.ref_model):
            if model is not None:
                self._replay.add(model)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        sharding.set_precision(self.accelerator)

    def run(self) -> None:
        """Serve the feed until it is closed. Raises what a step raised."""
        self._writers = [Background(self._ranks, name) for name in ("weights", "checkpoint")]
        try:
            self.train()
        except Closed:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            for writer in self._writers:
                writer.close()

    def get_train_dataloader(self) -> CommandQueue | RankCommands:
        return self._feed

    @property
    def sharded(self) -> bool:
        """Return whether no rank has all weights."""
        return is_sharded(self.model)

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Accumulate the gradients of the micro-batches of one step. Returns its loss."""
        batch: Batch = inputs["batch"]
        part: int = inputs["part"]
        if part == 0:
            self._begin(model, batch)
        micro_batches = [batch.micro_batches[index] for index in batch.schedule[part]]
        # TRL counts micro-batches of a fixed number a step; ours differ from batch to batch.
        self._step, self.current_gradient_accumulation_steps = 0, len(micro_batches)
        total = torch.zeros((), device=self.accelerator.device)
        for index, micro in enumerate(micro_batches, start=1):
            last = index == len(micro_batches)
            self.accelerator.gradient_state._set_sync_gradients(last)
            # Gradients of sharded weights are reduced at once: all of them would not fit on one rank.
            at_once = last or is_sharded(self.model)
            synced = contextlib.nullcontext() if at_once else self.accelerator.no_sync(model)
            with synced, self._replaying(micro):
                total += super().training_step(model, micro, num_items_in_batch)
            if part == 0 and len(batch.schedule) > 1:
                micro["proximal"] = self._logps
        if not torch.isfinite(self._ranks.total(total)):
            raise SpadeError(
                f"The loss of step {self.state.global_step + 1} is not a finite number",
                remedy="Lower learner.optimizer.learning_rate, or set learner.precision = 'fp32'.",
            )
        if part + 1 == len(batch.schedule):
            self._report(batch, time.perf_counter() - self._started)
        return total

    @torch.no_grad()
    def _begin(self, model: torch.nn.Module, batch: Batch) -> None:
        """Note the proximal log-probs of rows that the first step leaves out: no weight has moved yet."""
        self._started = time.perf_counter()
        self._sums.zero_()
        for index in sorted(set(range(len(batch.micro_batches))) - set(batch.schedule[0])):
            micro = batch.micro_batches[index]
            with self._replaying(micro):
                micro["proximal"], _ = self._log_probs(model, self._prepare_inputs(micro), entropy=False)

    def _replaying(self, micro: MicroBatch) -> contextlib.AbstractContextManager[None]:
        if self._replay is None:
            return contextlib.nullcontext()
        return self._replay.replaying(micro, self.accelerator.device)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: MicroBatch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """Return the loss of one micro-batch; the sum over the micro-batches is the loss of the step.

        The ranks' gradients are averaged, so a share of the loss counts as often as there are ranks.
        """
        with self._replay.counting() if self._replay is not None else contextlib.nullcontext():
            logps, entropies = self._log_probs(model, inputs)
        self._logps = logps.detach()
        loss, sums = objective_loss(
            inputs, logps, entropies, self._objective, reference=self._reference(inputs)
        )
        self._sums += sums.to(self._sums.device)
        return loss * self._ranks.size

    @torch.no_grad()
    def _reference(self, inputs: MicroBatch) -> torch.Tensor | None:
        """Return the log-probs of the starting policy, None without a KL term."""
        if not self.beta:
            return None
        if self.ref_model is not None:
            return self._log_probs(self.ref_model, inputs, entropy=False)[0]
        with self.model.disable_adapter():
            return self._log_probs(self.model, inputs, entropy=False)[0]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what servers load: whole tensors under the names of the model's files, detached.

        Each shared tensor comes once (a tied head is left out), adapters are added. Empty on other ranks.
        """
        self._together("weights")
        return dict(published(self.model, keep=self._ranks.leads))

    def write_weights(self, path: Path, dtype: torch.dtype | None = None) -> Future[None]:
        """Copy this rank's part of what servers load as ``dtype``; write it to ``path`` behind the training.

        All ranks write their parts of one file. The future ends when all of it is on the disk.
        """
        self._together("write_weights", path, dtype)
        layers = copied(merged(self.model), self._ranks, dtype)

        def write() -> None:
            tensor_file.write(path, _joined(in_files(self.model, layer) for layer in layers))

        return self._writers[0].submit(write)

    def adapters(self) -> dict[str, torch.Tensor]:
        """Return the adapters alone, whole, under PEFT's names. On rank 0; empty tensors on others."""
        self._together("adapters")
        keep = self._ranks.leads
        return {name: whole(tensor, keep=keep) for name, tensor in lora.tensors(self.model)}

    def adapter_settings(self) -> dict[str, Any]:
        """Return what PEFT writes into adapter_config.json."""
        return lora.settings(self.model)

    @torch.no_grad()
    def canary(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs of ``tokens[1:]`` given their prefix, float32 (T - 1,), without autocast.

        Sharded weights give those of the training, as their layers are gathered in its precision.
        """
        self._together("canary", tuple(tokens))
        ids = torch.tensor([list(tokens)], device=self.accelerator.device)
        training = self.model.training
        self.model.eval()
        if is_sharded(self.model):
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "temperature": torch.ones(1)}
            logps = self._log_probs(self.model, inputs, entropy=False)[0][0]
        else:  # the class's own forward: the instance's is wrapped in autocast by accelerate
            logits = type(self.model).forward(self.model, input_ids=ids, use_cache=False).logits[0, :-1]
            logps = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
        self.model.train(training)
        return logps.cpu().numpy().astype(np.float32)

    def write_checkpoint(self, directory: Path) -> Future[None]:
        """Copy this rank's part of a checkpoint; write it into ``directory`` behind the training.

        The files do not tell how many ranks wrote them. The future ends when all of it is on the disk.
        """
        self._together("write_checkpoint", directory)
        weights = kept(self.model)  # first: FSDP2 puts back the shards that a canary has left gathered
        moments, optimizer = optimizer_state(self.model, self.optimizer)
        files = {checkpoint.MODEL: weights.items(), checkpoint.OPTIMIZER: moments}
        copies = {name: copied(named, self._ranks) for name, named in files.items()}
        generators: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state_all()
        extra = {"optimizer": optimizer, "generators": generators}

        def write() -> None:
            for name, layers in copies.items():
                tensor_file.write(directory / name, _joined(layers))
            if self._ranks.leads:
                torch.save(extra, directory / checkpoint.EXTRA)

        return self._writers[1].submit(write)

    def load(self, path: str, step: int) -> None:
        """Resume from the checkpoint in ``path``, which every rank reads. Raises SpadeError, OSError."""
        self._together("load", path, step)
        self.restore(checkpoint.read_tensors(Path(path)), step)

    def restore(self, saved: CheckpointTensors, step: int) -> None:
        """Put back what was written at ``step``. Raises SpadeError when it does not fit."""
        put(kept(self.model), saved.model)
        restore_optimizer(self.model, self.optimizer, saved.extra["optimizer"])
        self.state.global_step = self._globalstep_last_logged = step
        if not self._ranks.leads:
            torch.manual_seed(self.args.seed + step * self._ranks.size + self._ranks.rank)
            return
        generators = saved.extra["generators"]
        torch.set_rng_state(generators["torch"])
        random.setstate(generators["python"])
        if "cuda" in generators and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(generators["cuda"])

    def _together(self, name: str, *arguments: Any) -> None:
        """Call the method of that name on the other ranks, too."""
        if self._ranks.leads:
            self._ranks.send("call", name, arguments)

    def _log_probs(
        self, model: torch.nn.Module, inputs: MicroBatch, *, entropy: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = inputs["input_ids"]
        at_temperature = functools.partial(model, temperature=inputs["temperature"][0].item())
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            at_temperature, ids, inputs["attention_mask"], ids.size(1) - 1, compute_entropy=entropy
        )
        return logps, entropies

    def _prepare_inputs(self, generation_batch: MicroBatch) -> MicroBatch:
        return {name: tensor.to(self.accelerator.device) for name, tensor in generation_batch.items()}

    def _send_telemetry(self) -> None:
        """Send nothing: a run does not report to TRL's authors."""

    def _report(self, batch: Batch, seconds: float) -> None:
        sums, steps = self._ranks.total(self._sums).tolist(), len(batch.schedule)
        values = metrics(sums, steps=steps, passes=batch.passes) | {
            "padding_waste": batch.waste,
            "micro_batches": float(len(batch.micro_batches)),
            "optimizer_steps": float(steps),
            "tokens_per_second": batch.tokens * batch.passes / seconds,
        }
        if self._replay is not None:
            differ, compared = self._ranks.total(self._replay.counts).tolist()
            values["router_mismatch"] = differ / max(compared, 1.0)
            self._replay.counts.zero_()
        for name, value in values.items():
            if name != "loss":
                self._metrics["train"][name].append(value)
        self._feed.finish(values)


class _StepCallback(TrainerCallback):  # type: ignore[misc]  # transformers is imported without types
    """Refuses a broken gradient, adds the loop's metrics to those of a step, and releases free memory."""

    def __init__(self, feed: CommandQueue | RankCommands, ranks: Ranks) -> None:
        self._feed, self._ranks = feed, ranks

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        gradients = (parameter.grad for parameter in context["model"].parameters())
        broken = not all(
            torch.isfinite(local(gradient)).all() for gradient in gradients if gradient is not None
        )
        if self._ranks.total(torch.tensor(float(broken))):
            raise SpadeError(
                f"The gradient of step {state.global_step + 1} is not finite",
                remedy="Lower learner.optimizer.learning_rate, or set learner.precision = 'fp32'.",
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        malloc.release()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **context: Any) -> None:
        del state.log_history[:-_HISTORY]  # it would grow for as long as the run lasts
        self._feed.complete(
            {name: float(logs[name]) for name in ("grad_norm", "learning_rate") if name in logs}
        )


def arguments(learner: LearnerConfig, output: Path, *, seed: int) -> GRPOConfig:
    """Return TRL's configuration for ``learner``; ``learner.trl`` adds settings that ours does not name.

    Raises ConfigError for a key of ``learner.trl`` that we set, that our loss would ignore, or that TRL
    does not know.
    """
    optimizer, gpu = learner.optimizer, torch.cuda.is_available()
    ours: dict[str, Any] = {
        "output_dir": str(output),
        "use_cpu": not gpu,
        "bf16": learner.precision == "bf16",
        "gradient_checkpointing": learner.gradient_checkpointing,
        "ddp_find_unused_parameters": False,
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
        "disable_dropout": True,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "seed": seed,
    }
    if optimizer.kind != "adamw":
        ours["optim"] = _OPTIMIZERS[optimizer.kind]
    refused = sorted(learner.trl.keys() & (ours.keys() | _LOSS_SETTINGS))
    if refused:
        raise ConfigError(
            f"learner.trl may not set {', '.join(refused)}",
            remedy="Use the settings of [learner]; the loss is computed from them.",
        )
    try:
        settings = GRPOConfig(**ours, **learner.trl)
    except TypeError as error:
        raise ConfigError(f"learner.trl: {error}", remedy="Use fields of trl.GRPOConfig.") from error
    except ValueError as error:
        raise ConfigError(
            f"The trainer refuses its settings: {error}",
            remedy="Change what it names: learner.precision, learner.trl, learner.launch.",
        ) from error
    settings._n_gpu = min(settings.n_gpu, 1)  # else one process that sees several would become DataParallel
    return settings


def build(
    learner: LearnerConfig,
    model: Path,
    output: Path,
    feed: CommandQueue | RankCommands,
    *,
    seed: int,
    ranks: Ranks | None = None,
) -> PolicyTrainer:
    """Load the policy in ``model`` (a Hugging Face directory, weights in float32) and its trainer.

    Raises ConfigError when the model cannot be loaded, or the ranks do not work as they were launched.
    """
    ranks = ranks or Ranks()
    transformers_logging.disable_progress_bar()
    settings = arguments(learner, output, seed=seed)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        policy = AutoModelForCausalLM.from_pretrained(
            model,
            config=_without_noise(AutoConfig.from_pretrained(model, local_files_only=True)),
            dtype=torch.float32,
            attn_implementation=learner.attention,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"The policy cannot be loaded: {error}", where=str(model)) from error
    with lora.explained(learner.lora):
        trainer = PolicyTrainer(
            feed=feed,
            objective=Objective.of(learner),
            ranks=ranks,
            peft_config=lora.peft_config(learner.lora),
            model=policy,
            reward_funcs=_no_reward,
            args=settings,
            processing_class=tokenizer,
            callbacks=[_StepCallback(feed, ranks)],
        )
    lora.require_mergeable(trainer.model)
    if learner.router_replay:
        trainer.replay_routing()
    _require_launch(trainer, ranks)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _joined(layers: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for layer in layers for name, tensor in layer.items()}


def _take_temperature(model: Any, *, in_fp32: bool) -> None:
    """Give the model's forward an argument ``temperature``, which divides the logits of its fused head.

    TRL's own head, which the constructor added, has one temperature for all rows.
    """
    heads: dict[float, Any] = {}
    plain = model.forward

    @functools.wraps(type(model).forward)
    def forward(module: Any, *positional: Any, temperature: float = 1.0, **named: Any) -> Any:
        if temperature == 1.0:
            return plain(*positional, **named)
        if temperature not in heads:
            outer = module.forward
            outputs = ("log_probs", "entropy")
            add_fused_lm_head(module, temperature, cast_lm_head_to_fp32=in_fp32, outputs=outputs)
            heads[temperature], module.forward = module.forward, outer
        return heads[temperature](*positional, **named)

    model.forward = types.MethodType(forward, model)


def _without_noise(settings: Any) -> Any:
    """Set dropout and router noise to 0 in a model's configuration, also in nested ones.

    The loss compares log-probs with the server's, which has neither.
    """
    for name, value in list(vars(settings).items()):
        if isinstance(value, PreTrainedConfig):
            _without_noise(value)
        elif isinstance(value, float) and value and _NOISE.search(name):
            setattr(settings, name, 0.0)
            _log.info("learner.noise_off", setting=name, was=value)
    return settings


def _require_launch(trainer: PolicyTrainer, ranks: Ranks) -> None:
    """Check the effective setup: accelerate falls back silently. Raises ConfigError."""
    runs, how = trainer.accelerator.num_processes, trainer.accelerator.distributed_type
    if runs != ranks.size:
        raise ConfigError(
            f"The learner was launched on {ranks.size} processes, and accelerate works with {runs}",
            where="learner.launch",
            remedy="Launch with torchrun, or with accelerate launch --multi_gpu.",
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and not trainer.accelerator.is_fsdp2:
        raise ConfigError(
            f"learner.launch asks for FSDP2, and accelerate works with {how.value} here",
            where="learner.launch",
            remedy="It needs GPUs (and --fsdp_version 2); without it every rank holds all weights.",
        )


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
