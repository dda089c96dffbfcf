"""What a recipe's learner needs beyond the packages that are always there. No torch here."""

from __future__ import annotations

from importlib.util import find_spec

from engine.config import LearnerConfig
from engine.errors import ConfigError

_REPORTERS = ("tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "swanlab")


def require(learner: LearnerConfig) -> None:
    """Look whether the packages are installed that ``learner`` names. Raises ConfigError."""
    if learner.optimizer.kind != "adamw":
        _need("bitsandbytes", f'learner.optimizer.kind = "{learner.optimizer.kind}"')
    if learner.lora.rank:
        _need("peft", f"learner.lora.rank = {learner.lora.rank}")
    for name in learner.report_to:
        if name in _REPORTERS:
            _need(name, f'learner.report_to = ["{name}"]')


def _need(package: str, setting: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"{setting} needs the package {package}, which is not installed",
            remedy=f"Install it (pip install {package}), or take the setting back.",
        )
