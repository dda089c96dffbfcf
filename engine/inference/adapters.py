"""LoRA adapters in a vLLM server: one name per version of a run, and the names that requests use now.

A name always stands for the same weights.
"""

from __future__ import annotations

import re
from contextlib import suppress

from engine.lineage import Version

_NAME = re.compile(r"(?P<run>.+)@(?P<fence>[0-9]{1,9})\.(?P<step>[0-9]{1,9})")
_IN_USE = "vllm:lora_requests_info{"
_LISTED = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')


def kept(lead: int) -> int:
    """Return how many versions servers and learner keep: the newest, and those still used with ``lead``."""
    return max(3, lead + 2)


def name(run: str, version: int) -> str:
    """Return the name of the adapter of a packed version.

    A learner that does not continue exactly where the last one ended has a fence of its own, so the name is
    never given to other weights.
    """
    unpacked = Version.unpack(version)
    return f"{run}@{unpacked.fence}.{unpacked.step}"


def run_of(name: str) -> str:
    """Return the run that a name belongs to, "" for a name of another form."""
    match = _NAME.fullmatch(name)
    return match["run"] if match else ""


def version_of(name: str) -> int:
    """Return the packed version that a name stands for, -1 for a name of another form."""
    match = _NAME.fullmatch(name)
    return Version(int(match["fence"]), int(match["step"])).pack() if match else -1


def adapters_in_use(metrics: str) -> set[str] | None:
    """Return the names of the adapters of running and waiting requests, None when ``metrics`` do not say.

    ``metrics`` is vLLM's Prometheus text; the newest of its samples counts.
    """
    newest, names = 0.0, None
    for line in metrics.splitlines():
        if line.startswith(_IN_USE):
            with suppress(ValueError):
                at = float(line.rsplit(" ", 1)[1])
                if at >= newest:
                    newest, names = at, ",".join(_LISTED.findall(line))
    return None if names is None else {name for name in names.split(",") if name}
