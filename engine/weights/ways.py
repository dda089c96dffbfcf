"""The ways in which new weights reach the servers (``[server] weights``): the one table of them.

The checks of a recipe, the learner, the server role and the command line of vLLM read it. To add a way, write
a publisher (``engine.weights.publisher``) and a loader (``engine.weights.loaders``) and name both here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine import placement
from engine.config import Config
from engine.errors import Problem
from engine.inference.adapters import kept

if TYPE_CHECKING:
    from bus import Blobs
    from engine.weights.loaders import WeightLoader
    from engine.weights.publisher import Policy, Publisher


@dataclass(frozen=True)
class Way:
    """``moves`` describes the way.

    ``publisher`` makes the learner's side for a run in a directory, ``loader`` the server role's side with a
    cache directory. ``check`` yields the problems of a recipe. ``files`` ways carry files, as adapters are.
    """

    moves: str
    publisher: Callable[[Config, Path, Policy], Publisher]
    loader: Callable[[Config, Blobs, Path], WeightLoader]
    check: Callable[[Config], Iterator[Problem]]
    files: bool = True


def check(config: Config) -> Iterator[Problem]:
    """Yield the problems of ``[server] weights``."""
    way = WAYS.get(config.server.weights)
    if way is None:
        yield "server.weights", f"{config.server.weights!r} is no way for weights; there are {_names(WAYS)}"
        return
    yield from way.check(config)
    if config.adapters and not way.files:
        files = _names({name: one for name, one in WAYS.items() if one.files})
        yield (
            "learner.lora.publish",
            f'"adapter" travels as a file: server.weights must be {files}, not "{config.server.weights}"',
        )


def publisher(config: Config, directory: Path, policy: Policy) -> Publisher:
    """Return the learner's side for a run in ``directory``. Raises ConfigError."""
    return WAYS[config.server.weights].publisher(config, directory, policy)


def loader(config: Config, blobs: Blobs, cache: Path) -> WeightLoader:
    """Return the server role's side; ``cache`` is a directory for fetched files."""
    return WAYS[config.server.weights].loader(config, blobs, cache)


def _publish_files(config: Config, directory: Path, policy: Policy) -> Publisher:
    from engine.weights.adapters import AdapterPublisher
    from engine.weights.publisher import FilePublisher

    bus, keep, seconds = (
        config.server.weights == "bus",
        kept(config.curriculum.lead),
        config.learner.step_seconds,
    )
    if config.adapters:
        settings = policy.adapter_settings()
        return AdapterPublisher(directory / "adapters", settings, bus=bus, keep=keep, seconds=seconds)
    return FilePublisher(directory / "weights", bus=bus, keep=keep, seconds=seconds)


def _load_files(config: Config, blobs: Blobs, cache: Path) -> WeightLoader:
    from engine.weights.adapters import AdapterLoader
    from engine.weights.loaders import BusLoader, FileLoader

    if config.adapters:
        seconds = config.server.request_seconds
        return AdapterLoader(
            config.run.name, blobs, cache, keep=kept(config.curriculum.lead), request_seconds=seconds
        )
    return BusLoader(blobs, cache) if config.server.weights == "bus" else FileLoader()


def _publish_by_nccl(config: Config, directory: Path, policy: Policy) -> Publisher:
    from engine.weights import nccl

    return nccl.open_publisher(config, policy)


def _await_nccl(config: Config, blobs: Blobs, cache: Path) -> WeightLoader:
    from engine.weights.loaders import NcclLoader

    return NcclLoader()


def _no_problem(config: Config) -> Iterator[Problem]:
    yield from ()


def _from_one_device(config: Config) -> Iterator[Problem]:
    if placement.shards(config):
        yield (
            "server.weights",
            '"nccl" sends weights from one device, and the learner is sharded over several; '
            '"file" (one host, or a shared disk) and "bus" (any host) gather them',
        )
    if not config.server.urls and not config.server.port:
        yield "server.weights", '"nccl" needs fixed server addresses: set server.port or server.urls'


def _names(ways: Mapping[str, Way]) -> str:
    return " or ".join(f'"{name}"' for name in ways)


WAYS: dict[str, Way] = {
    "file": Way(
        "a file in the run's directory, on a disk that learner and servers see",
        _publish_files,
        _load_files,
        _no_problem,
    ),
    "bus": Way(
        "the same file through the broker, for servers on any host",
        _publish_files,
        _load_files,
        _no_problem,
    ),
    "nccl": Way(
        "a broadcast from the learner's GPU to the servers' GPUs",
        _publish_by_nccl,
        _await_nccl,
        _from_one_device,
        files=False,
    ),
}
