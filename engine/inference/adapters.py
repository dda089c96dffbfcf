"""Names of LoRA adapters in a server: one for each version of a run, and the same bytes under it for ever."""

from __future__ import annotations

import re

from engine.config import Config
from engine.lineage import Version

_NAME = re.compile(r"(?P<run>.+)@(?P<fence>[0-9]{1,9})\.(?P<step>[0-9]{1,9})")


def kept(config: Config) -> int:
    """Return how many versions a server and the learner keep: the newest, and what may still be asked for."""
    return max(3, config.curriculum.lead + 2)


def name(run: str, version: int) -> str:
    """Return the name of the adapter of a packed version. A learner that does not go on exactly where the
    last one ended has a fence of its own: no name is ever given to other weights.
    """
    unpacked = Version.unpack(version)
    return f"{run}@{unpacked.fence}.{unpacked.step}"


def run_of(name: str) -> str:
    """Return the run that a name belongs to, "" for a name that is none of ours."""
    match = _NAME.fullmatch(name)
    return match["run"] if match else ""


def version_of(name: str) -> int:
    """Return the packed version that a name stands for, -1 for a name that is none of ours."""
    match = _NAME.fullmatch(name)
    return Version(int(match["fence"]), int(match["step"])).pack() if match else -1
