"""The directory of a run: its lock, its layout, what a resume may change, and finding runs again.

Layout: ``run.lock`` (who runs it), ``config.toml`` (the resolved recipe), ``model.path`` (what it started
from), ``run.db`` (what happened), ``report.html``, ``logs/``, ``bus/`` (the private broker's streams); the
learner and the scorer keep their own directories beside them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine import recipe
from engine.config import Config
from engine.errors import ConfigError, SpadeError
from engine.files import free_mb, replace

LEAST_FREE_MB = 512
"""Free space a run asks for before it starts: streams, checkpoints and weights of a small model."""

FIXED = (
    "run.seed",
    "model",
    "warmstart",
    # which tickets there are, and whose designs are trained
    "designer.skills",
    "designer.skills_per_cohort",
    "designer.designs_per_ticket",
    "designer.kind",
    "designer.invalid",
    # the loss divides logits by it
    "designer.sampling.temperature",
    # both arms of a pair play by the same rules, although one may be played after the resume
    "agent.max_turns",
    "agent.context_tokens",
    "agent.play_tokens",
    "agent.sampling",
    "agent.prompt",
    "agent.tool_format",
    "agent.malformed",
    "agent.truncated",
    "curriculum",
    "reward",
    "learner.agent",
    "learner.designer",
    "learner.train_hinted",
    "learner.hinted_weight",
    "learner.lora",
)
"""Settings that a resumed run keeps: the curriculum is replayed from its events under these settings, and
what is under way when a run stops belongs with what comes after."""


class RunDirectory:
    """Paths of one run. Nothing is created before :meth:`locked` is entered."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock_file = root / "run.lock"
        self.config_file = root / "config.toml"
        self.database = root / "run.db"
        self.report = root / "report.html"
        self.model_file = root / "model.path"
        self.logs = root / "logs"
        self.bus = root / "bus"

    @classmethod
    def of(cls, config: Config) -> RunDirectory:
        """Return the directory that ``config`` names, as an absolute path."""
        return cls((Path(config.run.directory).expanduser() / config.run.name).resolve())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process. Raises SpadeError when another process holds it."""
        self._create()
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise self._held(self.holder()) from error
            _write(descriptor, {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
            yield
            os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def holder(self) -> dict[str, Any] | None:
        """Return pid, host and start of the process that runs this run now, None when there is none."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _read(descriptor)
        else:
            return None
        finally:
            os.close(descriptor)

    def running(self) -> dict[str, Any]:
        """Return :meth:`holder`. Raises SpadeError when no process runs this run."""
        holder = self.holder()
        if holder is None:
            raise SpadeError(
                f"The run {self.root.name} is not running.",
                remedy="`spade ls` lists the runs; `spade run` with the same recipe continues this one.",
            )
        return holder

    def stop(self) -> int:
        """Ask the process that runs this run to finish the work in hand and end; return its pid.

        It goes on for up to ``run.drain_seconds``. Raises SpadeError when no process of this host runs it.
        """
        holder = self.running()
        if holder.get("host") != socket.gethostname():
            raise SpadeError(
                f"The run {self.root.name} runs on {holder.get('host')}.", remedy="Stop it on that host."
            )
        os.kill(holder["pid"], signal.SIGTERM)
        return int(holder["pid"])

    def steps(self) -> int | None:
        """Return the rounds that its recipe asks for, None when that cannot be read."""
        try:
            return int(tomllib.loads(self.config_file.read_text(encoding="utf-8"))["run"]["steps"])
        except (OSError, KeyError, tomllib.TOMLDecodeError):
            return None

    def adopt(self, config: Config) -> bool:
        """Write ``config`` as the run's; return whether the run existed before.

        Raises ConfigError when the run was started with settings that a resume may not change.
        """
        resumed = self.require_same(config)
        replace(self.config_file, recipe.dump(config).encode())
        return resumed

    def require_same(self, config: Config) -> bool:
        """Return whether the run existed before. Raises ConfigError when ``config`` cannot resume it."""
        if not self.config_file.exists():
            return False
        changed = [
            f"{key} was {json.dumps(was)}, is {json.dumps(now)}"
            for key, (was, now) in recipe.differences(recipe.load(self.config_file).config, config).items()
            if recipe.is_within(key, FIXED)
        ]
        if changed:
            raise ConfigError(
                f"The run {config.run.name} in {self.root} was started with other settings: "
                f"{'; '.join(changed)}.",
                remedy="A resumed run keeps these. Undo the change, or start another with run.name=NAME.",
            )
        return True

    def starting_model(self) -> Path | None:
        """Return the directory of the model this run started from, None before it has one.

        A resumed run keeps it, whatever the recipe's warm start would build today. Raises ConfigError when
        the directory is gone.
        """
        if not self.model_file.exists():
            start = self.root / "start"  # of a run that began at a checkpoint
            return start if start.is_dir() else None
        path = Path(self.model_file.read_text(encoding="utf-8", errors="replace").strip())
        if not path.is_absolute():
            raise ConfigError(
                f"The file {self.model_file} is damaged: it does not name a directory.",
                remedy="Write the absolute path of the run's starting model into it, or remove it if the "
                "recipe still leads to that model.",
            )
        if not path.is_dir():
            raise ConfigError(
                f"The run {self.root.name} started from the model in {path}, which is gone.",
                where=str(self.model_file),
                remedy="Bring that directory back, or start another run with run.name=NAME.",
            )
        return path

    def keep_starting_model(self, path: Path) -> None:
        """Write down where the starting model is."""
        replace(self.model_file, str(path.resolve()).encode())

    def config(self) -> Config:
        """Return the resolved recipe of this run. Raises ConfigError for one that this build cannot read."""
        try:
            return recipe.load(self.config_file).config
        except ConfigError as error:
            raise ConfigError(
                error.what,
                where=error.where,
                remedy="Another build of spade wrote this file, or it was edited. "
                "Take out of it what this build does not know, or use that build.",
            ) from error

    def require_space(self, least_mb: int = LEAST_FREE_MB) -> None:
        """Raise ConfigError when the disk under the run has less than ``least_mb`` MB free."""
        place = self.root
        while not place.exists():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK) or not shutil.disk_usage(place).total:
            raise ConfigError(
                f"The run directory {self.root} cannot be created: nothing can be written in {place}.",
                remedy="Make it writable, or put the run elsewhere with run.directory=PATH.",
            )
        free = free_mb(self.root)
        if free < least_mb:
            raise ConfigError(
                f"The disk under the run directory {self.root} is full: "
                f"{free} MB are free, {least_mb} MB are needed.",
                remedy="Free some space, or put the run elsewhere with run.directory=PATH.",
            )

    def _create(self) -> None:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"The run directory {self.root} cannot be created: {error.strerror}.",
                remedy="Make it writable, free some space, or put the run elsewhere with run.directory=PATH.",
            ) from error

    def _held(self, holder: dict[str, Any] | None) -> SpadeError:
        who = "another process"
        if holder:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("since", 0)))
            who = f"process {holder.get('pid')} on {holder.get('host')} since {since}"
        return SpadeError(
            f"The run {self.root.name} is already running: {who} holds {self.lock_file}.",
            remedy="Watch it with `spade status`, stop it with Ctrl-C or `kill PID`, or use run.name=OTHER.",
        )


def find(name: str | None, directory: Path) -> RunDirectory:
    """Return a run by path or by name under ``directory``; the newest one when ``name`` is None.

    Raises ConfigError, with the runs that exist, when there is none.
    """
    runs = newest_first(directory)
    if name is None:
        if runs:
            return runs[0]
        raise ConfigError(f"There is no run in {directory}.", remedy="Start one: spade run nano")
    for candidate in (Path(name), directory / name):
        if (candidate / "run.db").exists() or (candidate / "config.toml").exists():
            return RunDirectory(candidate.resolve())
    known = ", ".join(run.root.name for run in runs) or "none"
    raise ConfigError(
        f"There is no run {name} here or in {directory}.", remedy=f"Runs in {directory}: {known}."
    )


def newest_first(directory: Path) -> list[RunDirectory]:
    """Return the runs in ``directory``, the last used first; one that starts has no database yet."""
    used: dict[Path, float] = {}
    for name in ("run.db", "config.toml"):
        for path in directory.glob(f"*/{name}"):
            used[path.parent] = max(path.stat().st_mtime, used.get(path.parent, 0.0))
    return [RunDirectory(path.resolve()) for path in sorted(used, key=used.__getitem__, reverse=True)]


def _write(descriptor: int, content: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({**content, "command": sys.argv}).encode(), 0)


def _read(descriptor: int) -> dict[str, Any]:
    try:
        content = json.loads(os.pread(descriptor, 65536, 0))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
