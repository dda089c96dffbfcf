"""The entry point for vLLM (group ``vllm.general_plugins``), called in each of vLLM's processes.

It registers the weight-transfer backend ``spade_file``. In a vLLM that spade started it also ties each
process to its parent: vLLM's engine process would otherwise outlive a killed API server, with all its memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

from engine.inference import LEASH, WEIGHT_BACKEND

_LEASH_NAME = "spade-leash"
_LEASH_SECONDS = 1.0


def register() -> None:
    """Register the engine with vLLM's factory and, where ``SPADE_VLLM_LEASH`` is set, tie the process.

    The engine's module is imported only when a server asks for the backend, so that a vLLM that serves
    something else pays nothing.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_BACKEND, "engine.weights.transfer", "FileWeightTransferEngine"
        )
    except ValueError as error:
        if "already registered" not in str(error):
            raise
    if os.environ.get(LEASH):
        tie_to_parent()


def tie_to_parent() -> None:
    """Kill this process within about a second of its parent's end. Calling it again has no effect.

    A thread polls the parent's id, because the kernel's parent-death signal follows the parent's *thread*.
    """
    if any(thread.name == _LEASH_NAME for thread in threading.enumerate()):
        return
    parent = multiprocessing.parent_process()
    expected = os.getppid() if parent is None else parent.pid
    threading.Thread(target=_watch, args=(expected,), name=_LEASH_NAME, daemon=True).start()


def _watch(expected: int | None) -> None:
    while os.getppid() == expected:
        time.sleep(_LEASH_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
