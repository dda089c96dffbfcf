"""Reads the few series of vLLM's Prometheus text that say whether a server is congested."""

from __future__ import annotations

import re
from contextlib import suppress

_WAITING = "vllm:num_requests_waiting"
_PREEMPTIONS = "vllm:num_preemptions_total"
_USAGE = "vllm:kv_cache_usage_perc"
_FULL = 0.9
_ADAPTERS = "vllm:lora_requests_info{"
_LISTED = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')


def congestion(text: str) -> tuple[float, float]:
    """Return (requests that wait for room now, preemptions so far), summed over engines; zeros without the
    series. What is no number is passed over.

    A server takes more requests at once than are sent to it: those that wait while its cache has room wait
    for others' prefill, as after every burst, and fewer requests would only make it slower.
    """
    usage = _values(text, _USAGE)
    waiting = sum(_values(text, _WAITING)) if max(usage, default=1.0) >= _FULL else 0.0
    return waiting, sum(_values(text, _PREEMPTIONS))


def adapters_in_use(text: str) -> set[str] | None:
    """Return the names of the adapters of requests that run or wait, as of the newest of vLLM's notes; None
    without one.
    """
    newest, names = 0.0, None
    for line in text.splitlines():
        if line.startswith(_ADAPTERS):
            with suppress(ValueError):
                at = float(line.rsplit(" ", 1)[1])
                if at >= newest:
                    newest, names = at, ",".join(_LISTED.findall(line))
    return None if names is None else {name for name in names.split(",") if name}


def _values(text: str, name: str) -> list[float]:
    found = []
    for line in text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            with suppress(ValueError):
                found.append(float(line.rsplit(" ", 1)[1]))
    return found
