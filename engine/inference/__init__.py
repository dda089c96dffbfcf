"""vLLM servers and the pool in front of them.

The names here are shared with spade's plug-in inside vLLM's processes (``engine.weights.plugin``), which must
not import more than this.
"""

WEIGHT_BACKEND = "spade_file"
LEASH = "SPADE_VLLM_LEASH"
"""The environment variable that ties vLLM's processes to their parent."""
