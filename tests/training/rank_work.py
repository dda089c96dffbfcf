"""Not a test: what each rank of a learner does in the tests of several. Results go into a file of rank 0.

``python rank_work.py JOB.json``, alone or under torchrun. Numbers of the tests are made here, so that one and
two processes get the same batches. A job may name several ``models``, folders below its policy, for one after
the other.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from learner_fakes import VOCABULARY, random_samples
from msgspec.structs import replace
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from engine.config import LearnerConfig, RoleTraining
from engine.lineage import Version
from engine.training import checkpoint
from engine.training.background import start
from engine.training.batch import Batch, build, policy_rows
from engine.training.checkpoint import LearnerState
from engine.training.command_queue import Call, CommandQueue, RankCommands, Step
from engine.training.rank_worker import TrainerPlan, follow, lead
from engine.training.ranks import Ranks
from engine.training.samples import Routes
from engine.weights import tensor_file
from engine.weights.store import file_digest

ROLES: dict[Any, RoleTraining] = {"agent": RoleTraining(), "designer": RoleTraining(weight=0.7)}
TOKENS = tuple(range(3, 40, 3))


def batch(seed: int, *, rows: int, bound: int, steps: int, routed: bool = False) -> Batch:
    samples = [*random_samples(rows, seed=seed), *random_samples(1, seed=50 + seed, role="designer")]
    routes = Routes(layers=2, top_k=2, experts=4) if routed else None
    if routed:
        samples = [
            one._replace(
                segments=tuple(replace(part, experts=b"\0\1\2\3" * (len(part) - 1)) for part in one.segments)
            )
            for one in samples
        ]
    return build(
        policy_rows(samples, ROLES, 18, routes=routes),
        micro_batch_tokens=bound,
        padding=VOCABULARY - 2,
        steps=steps,
    )


def shard_on_cpu() -> None:
    """Have accelerate shard on the CPU as it does on GPUs; by itself it takes whole weights there."""
    import accelerate.state as state
    from accelerate.utils import FullyShardedDataParallelPlugin

    real = state.AcceleratorState.__init__

    def patched(self: Any, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **named)
        if "fsdp_plugin" in self._shared_state:
            return
        plugin = named.get("fsdp_plugin") or FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        if self.mixed_precision == "bf16":
            plugin.set_mixed_precision("bf16")
        self.distributed_type = state.DistributedType.FSDP
        self.fsdp_plugin = plugin
        state.PartialState._shared_state["distributed_type"] = state.DistributedType.FSDP

    state.AcceleratorState.__init__ = patched


class Held:
    """The bytes of gathered tensors that live at once, at their peak, while it is entered."""

    def __enter__(self) -> Held:
        self.peak, self._real = 0, DTensor.full_tensor
        live: list[tuple[StorageWeakRef, int]] = []

        def counted(tensor: Any, **settings: Any) -> torch.Tensor:
            made = self._real(tensor, **settings)
            storage = made.untyped_storage()
            live.append((StorageWeakRef(storage), storage.nbytes()))
            live[:] = [one for one in live if not one[0].expired()]
            self.peak = max(self.peak, sum(size for _, size in live))
            return made

        DTensor.full_tensor = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        DTensor.full_tensor = self._real  # type: ignore[method-assign]


class Together(Ranks):
    """Ranks that meet once, for all models of a job."""

    def join(self) -> None:
        if not dist.is_initialized():
            super().join()

    def leave(self) -> None:
        pass


def main(job: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    if not ranks.leads:
        if job.get("dies") == "follower":
            RankCommands.__next__ = lambda _: os._exit(7)  # type: ignore[method-assign]
        from engine.training.trainer import build

        follow(ranks, build)
        return {}
    learner = msgspec.convert(job["learner"], LearnerConfig)
    home = Path(job["home"])
    if not ranks.alone:
        lead(ranks, TrainerPlan(learner, job["policy"], str(home), 3))
    from engine.training.trainer import build as build_trainer

    feed = CommandQueue(ranks)
    trainer = build_trainer(learner, Path(job["policy"]), home, feed, seed=3, ranks=ranks)
    errands, steps, completing = [], [], []

    def complete(begun: Call) -> None:
        begun.result.result()()

    def errand(function: Any) -> None:
        errands.append(Call(function))
        feed.submit(errands[-1])

    def look() -> dict[str, Any]:
        published = trainer.adapters() if learner.lora.publish == "adapter" else trainer.weights()
        weights = {name: tensor.clone() for name, tensor in published.items()}
        how = trainer.accelerator.distributed_type.value
        canary = trainer.canary(TOKENS).tolist()
        models = (trainer.model, trainer.ref_model) if trainer.ref_model is not None else (trainer.model,)
        units = [sum(isinstance(one, FSDPModule) for one in model.modules()) for model in models]
        named = [model.named_parameters() for model in models]
        kept = [str(next(one.dtype for name, one in each if ".layers." in name)) for each in named]
        found = {"weights": weights, "canary": canary, "sharded": trainer.sharded, "how": how}
        return found | {"units": units, "dtypes": kept}

    def publish(name: str) -> dict[str, Any]:
        part, real = [], tensor_file.write

        def noted(path: Path, found: Any) -> None:
            part.append(sum(one.nbytes for one in found.values() if not one.is_meta))
            real(path, found)

        tensor_file.write = noted
        with Held() as held:
            written = trainer.write_weights(home / name, torch.bfloat16)
        written.result()
        tensor_file.write = real
        return {"digest": file_digest(home / name), "peak": held.peak, "kept": part[0]}

    if job.get("dies") == "writing":  # its second checkpoint, with the weights written and the moments not
        real = tensor_file.write

        def killed(path: Path, *arguments: Any, **named: Any) -> None:
            if path.name == checkpoint.OPTIMIZER and checkpoint.places(home / "kept"):
                path.write_bytes(b"some")
                os.kill(os.getpid(), signal.SIGKILL)
            real(path, *arguments, **named)

        tensor_file.write = killed
    if job.get("publishes"):
        errand(partial(publish, "published"))
    if "resume" in job:
        errand(lambda: trainer.load(job["resume"], 1))
    errand(look)
    for number, each in enumerate(job["batches"], start=1):
        steps.append(Step(lambda each=each: batch(**each)))
        feed.submit(steps[-1])
        errand(look)
        if number in job["saves"]:
            state = LearnerState(version=Version(0, number))
            errand(partial(checkpoint.begin, home / "kept", state, trainer.write_checkpoint, keep=9))
            completing.append(start(partial(complete, errands[-1]), "checkpoint"))
    if job.get("publishes") == "twice":
        errand(partial(publish, "again"))
    if job.get("dies") == "leader":
        errand(lambda: os._exit(7))
    feed.submit(None)
    trainer.run()
    for one in completing:
        one.result()
    looks = [one for one in (each.result.result() for each in errands) if isinstance(one, dict)]
    return {"looks": looks, "metrics": [step.result.result() for step in steps]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    job, ranks, found = json.loads(Path(sys.argv[1]).read_text()), Together.launched(), {}
    if job.get("sharded"):
        shard_on_cpu()
    for name in job.get("models", [""]):
        each = {key: str(Path(job[key], name)) for key in ("policy", "home")}
        found[name] = main({**job, **each}, ranks)
    Ranks.leave(ranks)
    if ranks.leads:
        torch.save(found if "models" in job else found[""], job["out"])
