"""Reads the few series of vLLM's Prometheus text that say whether a server is congested."""

from __future__ import annotations

from contextlib import suppress

_WAITING = "vllm:num_requests_waiting"
_PREEMPTIONS = "vllm:num_preemptions_total"


def congestion(text: str) -> tuple[float, float]:
    """Return (requests waiting now, preemptions so far), summed over engines; zeros without the series.
    What is no number is passed over."""
    return _total(text, _WAITING), _total(text, _PREEMPTIONS)


def _total(text: str, name: str) -> float:
    total = 0.0
    for line in text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            with suppress(ValueError):
                total += float(line.rsplit(" ", 1)[1])
    return total
