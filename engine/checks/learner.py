"""Rules of a recipe about checkpoints, adapters, how the learner is launched, and what it is fed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from engine.config import Config, LearnerConfig, LoraConfig
from engine.errors import ConfigError

Problem = tuple[str, str]
LARGEST_RANK = 512
_SECONDS_A_TOKEN = 0.2  # slower than that a server is of no use


def learners(config: Config) -> Iterator[Problem]:
    """Yield the problems of a learner's checkpoints and adapters."""
    yield from _best(config.learner.best_by, [suite.name for suite in config.evaluator.suites])
    yield from _lora(config.learner.lora)


def _best(best: str, suites: Sequence[str]) -> Iterator[Problem]:
    if best.startswith("metric:"):
        if not best.removeprefix("metric:").lstrip("-"):
            yield "learner.best_by", "must name a metric of a batch, like metric:entropy or metric:-loss"
    elif best and best not in suites:
        known = ", ".join(suites) or "there is none"
        yield "learner.best_by", f'must name a suite of the evaluator ({known}), or be "metric:NAME"'


def _lora(lora: LoraConfig) -> Iterator[Problem]:
    if lora.publish == "adapter" and not 1 <= lora.rank <= LARGEST_RANK:
        yield (
            "learner.lora.publish",
            f'"adapter" needs a learner.lora.rank of 1 to {LARGEST_RANK}, which is what vLLM takes',
        )


def longest_reply(config: Config) -> float:
    """Return the seconds that the longest reply which is trained may take.

    A reply that misses its deadline is sampled again. If long replies missed it, only short ones would be
    trained.
    """
    replies = [config.agent.sampling]
    if config.designer.kind == "policy":
        replies += [config.designer.sampling, config.designer.hint_sampling]
    return max(sampling.max_tokens for sampling in replies) * _SECONDS_A_TOKEN


def require_packages(learner: LearnerConfig) -> None:
    """Check that the packages that ``learner`` needs are installed. Raises ConfigError."""
    needed = {}
    if learner.optimizer.kind != "adamw":
        needed["bitsandbytes"] = f'learner.optimizer.kind = "{learner.optimizer.kind}"'
    if learner.lora.rank:
        needed["peft"] = f"learner.lora.rank = {learner.lora.rank}"
    for package, setting in needed.items():
        if find_spec(package) is None:
            raise ConfigError(
                f"{setting} needs the package {package}, which is not installed",
                remedy=f"Install it (pip install {package}), or take the setting back.",
            )
