"""The machine and the software that made a result."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

_GIT_SECONDS = 5.0


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and its software; ``memory_gb`` is in GiB."""

    system: str
    processor: str
    cores: int
    memory_gb: float
    python: str
    versions: dict[str, str]


def describe(packages: Iterable[str] = ()) -> Machine:
    """Describe this machine, with the versions of those of ``packages`` that are installed."""
    installed = {one.name for one in importlib.metadata.distributions()}
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=psutil.cpu_count() or 1,
        memory_gb=round(psutil.virtual_memory().total / (1 << 30), 1),
        python=platform.python_version(),
        versions={one: importlib.metadata.version(one) for one in packages if one in installed},
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str:
    """Return the git commit of the checkout that this code runs from, with "+" after it when files differ.

    Empty for an installed package.
    """
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        found, changed = (
            subprocess.run(
                ["git", "-C", str(root), *command],
                capture_output=True,
                text=True,
                timeout=_GIT_SECONDS,
                check=True,
            ).stdout.strip()
            for command in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{found}+" if changed else found
