"""The files of one evaluation: ``evaluation.json`` (the conditions), ``samples.jsonl``, ``summary.json``.

Every sample is written when it is finished, so an interrupted evaluation is continued by the same command.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.errors import ConfigError
from engine.evals.statistics import Estimate, Figures, Scores, figures

Policy = Literal["model", "null", "random"]
CONDITIONS, SAMPLES, SUMMARY = "evaluation.json", "samples.jsonl", "summary.json"
_FREE = ("started", "concurrency", "estimate_seconds")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One play of one item. ``asked`` has the turns: what the player saw, and its whole reply."""

    suite: str
    policy: Policy
    item: str
    group: str
    sample: int
    score: float
    reason: str = ""
    tokens: int = 0
    versions: tuple[int, int] | None = None
    seconds: float = 0.0
    asked: list[tuple[str, str]] = []
    detail: dict[str, Any] = {}


class SuiteSummary(msgspec.Struct, kw_only=True):
    """One suite: figures of the model, of each group, and of the baselines.

    ``missing`` says why it was not played, ``lost`` counts samples without an outcome.
    """

    version: str = ""
    split: str = "test"
    preset: str = ""
    wanted: int = 0
    lost: int = 0
    missing: str = ""
    model: Figures | None = None
    groups: dict[str, Figures] = {}
    baselines: dict[str, Estimate] = {}
    overlap: dict[str, int] = {}

    @property
    def partial(self) -> bool:
        return bool(self.missing or self.lost or self.model is None)


class Summary(msgspec.Struct, kw_only=True):
    """All suites of one evaluation, by name, and its conditions."""

    conditions: dict[str, Any]
    suites: dict[str, SuiteSummary]
    seconds: float = 0.0

    @property
    def partial(self) -> bool:
        return any(suite.partial for suite in self.suites.values())


class Journal:
    """Appends samples to a directory. Raises ConfigError when it holds results under other conditions."""

    def __init__(self, directory: Path, conditions: dict[str, Any]) -> None:
        self.directory, self.conditions = directory, conditions
        directory.mkdir(parents=True, exist_ok=True)
        known = directory / CONDITIONS
        if known.exists():
            before = msgspec.json.decode(known.read_bytes())
            changed = [
                key
                for key in {*before, *conditions} - {*_FREE}
                if before.get(key) != msgspec.to_builtins(conditions.get(key))
            ]
            if changed:
                raise ConfigError(
                    f"{directory} holds an evaluation under other conditions: {', '.join(sorted(changed))}.",
                    remedy="Name another directory with --out.",
                )
        else:
            known.write_bytes(_pretty({**conditions, "started": time.strftime("%FT%T%z")}))
        self.samples = list(read_samples(directory))
        _mend(directory / SAMPLES)

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        with (self.directory / SAMPLES).open("ab") as stream:
            stream.write(msgspec.json.encode(sample) + b"\n")

    def finish(self, summary: Summary) -> None:
        (self.directory / SUMMARY).write_bytes(_pretty(summary))


def read_samples(directory: Path) -> Iterable[Sample]:
    """Yield the samples of an evaluation; a last line that was cut is left out."""
    file = directory / SAMPLES
    if not file.exists():
        return
    decode = msgspec.json.Decoder(Sample).decode
    for line in file.read_bytes().split(b"\n")[:-1]:
        yield decode(line)


def read_summary(directory: Path) -> Summary:
    """Return the summary of an evaluation. Raises ConfigError when there is none."""
    try:
        return msgspec.json.decode((directory / SUMMARY).read_bytes(), type=Summary)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{directory} holds no finished evaluation: {error}.",
            remedy="Name a directory that `spade eval --out DIR` wrote.",
        ) from error


def scores(samples: Iterable[Sample], suite: str, *, policy: Policy = "model", group: str = "") -> Scores:
    """Return the scores of a suite by item."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in samples:
        if one.suite == suite and one.policy == policy and group in ("", one.group):
            found[one.item].append(one.score)
    return found


def summarise(suite: SuiteSummary, name: str, samples: Sequence[Sample]) -> SuiteSummary:
    """Fill in the figures of ``suite`` from its samples."""
    own = [sample for sample in samples if sample.suite == name]
    played = [sample for sample in own if sample.policy == "model"]
    if played:
        suite.model = figures(scores(played, name))
        groups = sorted({sample.group for sample in played})
        suite.groups = {group: figures(scores(played, name, group=group)) for group in groups}
    for policy in ("null", "random"):
        found = scores(own, name, policy=policy)
        if found:
            suite.baselines[policy] = figures(found).mean
    return suite


def _mend(file: Path) -> None:
    """Cut a last line off that was not written to its end."""
    if file.exists():
        data = file.read_bytes()
        if not data.endswith(b"\n"):
            file.write_bytes(data[: data.rfind(b"\n") + 1])


def _pretty(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
