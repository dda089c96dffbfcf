"""Routed experts from vLLM on CPUs: its runner that returns them needs Triton; the other one gets the parts.

Capture, store and encoding of the experts are vLLM's own, as are routers, scheduler and answers. A server
that was started with the folder of :func:`install` in PYTHONPATH loads this as a plug-in.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


def install(directory: Path) -> Path:
    """Write the plug-in with its metadata into ``directory``."""
    metadata = directory / "vllm_experts-1.0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(__file__, directory / "vllm_experts.py")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm_experts\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nexperts = vllm_experts:register\n")
    return directory


def register() -> None:
    """Give vLLM's V1 runner the connector of its V2 runner."""
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    class Runner(CPUModelRunner):  # type: ignore[misc]
        def initialize_kv_cache(self, kv_cache_config: Any, *positional: Any, **named: Any) -> None:
            super().initialize_kv_cache(kv_cache_config, *positional, **named)
            self.experts = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

        def execute_model(self, scheduled: Any, *positional: Any, **named: Any) -> Any:
            self.experts.begin_step(scheduled.aux_output_connector_metadata)
            self.scheduled = scheduled.num_scheduled_tokens
            return super().execute_model(scheduled, *positional, **named)

        def sample_tokens(self, *positional: Any, **named: Any) -> Any:
            if self.execute_model_state is None:
                return super().sample_tokens(*positional, **named)
            names = list(self.input_batch.req_ids)
            counts = [self.scheduled[name] for name in names]
            pending = self.experts.prepare_output(
                SimpleNamespace(
                    req_ids=names,
                    query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
                    num_computed_tokens_np=self.input_batch.num_computed_tokens_cpu[: len(names)].copy(),
                )
            )
            output = super().sample_tokens(*positional, **named)
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
            return output

    from vllm.v1.worker import cpu_worker

    VllmConfig._verify_aux_output_compatibility = lambda config: None
    cpu_worker.CPUModelRunner = Runner
