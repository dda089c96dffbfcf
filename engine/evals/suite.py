"""The contract of a suite: what is asked, how it is judged, and what is needed for it.

A suite is a plug-in of the entry-point group ``spade.suites``: a function that returns a :class:`Suite` for
the argument of its source and the recipe. The command ``spade eval`` and the evaluator role play the same.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from engine import registry
from engine.config import Config, SamplingConfig
from engine.errors import ConfigError
from engine.inference.tokens import Content as Content
from engine.native_calls import Tools
from sandbox import SandboxPool, SandboxSettings

Split = Literal["test", "validation"]
Result = TypeVar("Result")
_WORD = re.compile(r"[A-Za-z]+|-?\d+")


class Program(NamedTuple):
    """An environment to be played: its source, the seed of its instance, its turns."""

    source: str
    seed: int
    max_turns: int


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One question of a suite.

    ``name`` is unique in the suite and the same in every evaluation; ``group`` is the column that it counts
    for; ``text`` is what the contamination guard reads; ``data`` is the suite's own.
    """

    name: str
    group: str
    text: str = ""
    data: Any = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one sample: ``score`` (1 is right), and the reason where it is none."""

    score: float
    reason: str = ""
    detail: dict[str, Any] = {}


class Reply(NamedTuple):
    """One answer of the model.

    ``text`` is the part outside reasoning, ``boxed`` the last box in it, ``whole`` all of the answer, for the
    conversation that goes on. ``calls`` are its calls of tools ({"name": ..., "arguments": ...}), and
    ``fault`` says what is wrong with calls that cannot be read.
    """

    text: str
    boxed: str | None
    cut: bool
    whole: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    fault: str = ""


class Seat(Protocol):
    """The model's place at one sample of one item. ``asked`` has what it was asked and what it answered."""

    sandbox: SandboxPool
    key: str
    asked: list[tuple[str, str]]

    @property
    def tokens(self) -> int:
        """The number of sampled tokens."""

    @property
    def versions(self) -> tuple[int, int] | None:
        """The lowest and highest version that answered."""

    async def ask(
        self, messages: Sequence[Content], *, system: str | None = None, tools: Tools = ()
    ) -> Reply:
        """Continue a conversation: turns of user and model, the user first and last.

        A turn of the user may be results of tools. ``tools`` are shown, and calls read, in the format of the
        model's chat template. Where the conversation does not fit the context, the answer is cut and empty.
        """

    def other(self) -> Seat:
        """Return the place of the simulated user: that of ``--user-endpoint``, else the model's own."""

    async def play(self, program: Program) -> Outcome:
        """Play an environment by the turn loop of training; the score is the return."""

    async def work(self, function: Callable[..., Result], *arguments: Any, seconds: float) -> Result:
        """Run a blocking function in a process of its own. Raises TimeoutError, and what it raises."""


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of a suite: ``samples`` for each of ``items`` (0: all)."""

    sampling: SamplingConfig
    samples: int = 1
    items: int = 0


def paper_and_smoke(
    paper: SamplingConfig, *, samples: int = 1, items: int = 0, smoke_items: int = 4, smoke_tokens: int = 256
) -> dict[str, Preset]:
    """Return the preset "paper", and "smoke": short replies to few items, to see that the suite works."""
    short = msgspec.structs.replace(paper, max_tokens=smoke_tokens)
    return {
        "paper": Preset(sampling=paper, samples=samples, items=items),
        "smoke": Preset(sampling=short, items=smoke_items),
    }


def version_of(package: str) -> str:
    """Return name and version of an installed distribution, for :attr:`Suite.version`."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package}, not installed"


class Suite(ABC):
    """A held-out suite. ``version`` names its data and what judges it: scores of two versions never mix.

    ``presets`` are its sampling settings by name, "paper" among them where the paper gives them. ``needs``
    are modules that it imports, and ``install`` is the command that installs them. A suite with the split
    "validation" may choose a checkpoint; one with "test" may only be reported.
    """

    version: str = "1"
    split: Split = "test"
    presets: ClassVar[Mapping[str, Preset]] = {}
    baselines: ClassVar[tuple[str, ...]] = ("null", "random")
    needs: ClassVar[tuple[str, ...]] = ()
    install: ClassVar[str] = "pip install --no-deps -r requirements/evals.lock"

    def available(self) -> str:
        """Return "" when the suite can be played here, else what is missing and how to get it."""
        missing = [name for name in self.needs if find_spec(name) is None]
        return f"the package {missing[0]} is not installed: {self.install}" if missing else ""

    @abstractmethod
    def items(self, count: int, seed: int) -> Sequence[Item]:
        """Return ``count`` items (0: all), the same for the same arguments; may block on files."""

    @abstractmethod
    async def play(self, item: Item, seat: Seat) -> Outcome:
        """Put one item to the model and judge it. Errors of servers and sandbox propagate."""

    async def null(self, item: Item, seat: Seat) -> Outcome:
        """Judge a player that does nothing: here one that answers with an empty box."""
        return await self.play(item, seat)

    def guess(self, item: Item, messages: Sequence[str], rng: random.Random) -> str:
        """Return the reply of a player that does not think: here a word of the last message."""
        words = _WORD.findall(messages[-1]) or ["1"]
        return f"\\boxed{{{rng.choice(words)}}}"

    def sandbox(self, settings: SandboxSettings) -> SandboxSettings:
        """Return the limits of the sandbox that the suite needs, at least ``settings``."""
        return settings


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return ``count`` items (0: all), taken from the groups in turn, in the order of the suite."""
    if not count or count >= len(items):
        return list(items)
    turns: dict[str, int] = {}
    order = []
    for place, item in enumerate(items):
        turns[item.group] = turns.get(item.group, -1) + 1
        order.append((turns[item.group], place))
    return [items[place] for _, place in sorted(order)[:count]]


def load(source: str, config: Config, *, where: str) -> Suite:
    """Return the suite ``NAME`` or ``NAME:ARGUMENT``. Raises ConfigError for an unknown or wrong one."""
    name, _, argument = source.partition(":")
    if name not in registry.registered(registry.SUITES):
        raise ConfigError(
            f"source = {source!r} begins with no known scheme",
            where=where,
            remedy=f"It must begin with {registry.schemes(registry.SUITES)}.",
        )
    build = registry.load(registry.SUITES, name, where=where)
    try:
        suite: Suite = build(argument, config)
    except ConfigError as error:
        raise ConfigError(f"source = {source!r}: {error.what}", where=where, remedy=error.remedy) from error
    return suite
