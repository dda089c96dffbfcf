"""vLLM's entry point (group ``vllm.general_plugins``): makes the backend ``spade_file`` known to it."""

from __future__ import annotations

BACKEND = "spade_file"
REFUSED = "spade_file refuses"  # begins the message of a push that changed nothing


def register() -> None:
    """Register the engine with vLLM's factory; called once in each of vLLM's processes.

    The engine's module is imported only when a server asks for the backend, so that a vLLM that serves
    something else pays nothing.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "engine.weights.transfer", "FileWeightTransferEngine"
        )
    except ValueError as error:
        if "already registered" not in str(error):
            raise
