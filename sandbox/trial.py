"""One program under validation, and the episodes that are played with it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sandbox import actions
from sandbox.errors import EnvFailure
from sandbox.probes import Transcript, play, solution_actions, tell
from sandbox.verdict import ValidatorSettings

if TYPE_CHECKING:
    from sandbox.instance import Instance
    from sandbox.metadata import Metadata
    from sandbox.pool import SandboxPool

BLIND = ("random", "constant", "babble")
# Exceptions of int(), indexing and look-ups on a text that is not an action, and of JSON, decimals and bytes.
_words = str.split
INVALID_ACTION = frozenset(
    _words("""
    ValueError TypeError IndexError KeyError JSONDecodeError InvalidOperation UnicodeEncodeError
    UnicodeDecodeError
    """)
)
_ADVICE = "; a meaningless action is answered by an observation"
_RETRIES = 5
_SEED_BITS = 31  # as many as the seeds of plays have

Choose = Callable[[Sequence[str]], Iterator[str]]


class Rejected(Exception):
    """A program fails ``rung``."""

    def __init__(self, rung: str, reason: str) -> None:
        super().__init__(reason)
        self.rung, self.reason = rung, reason


@dataclass
class Trial:
    """One program under validation.

    ``played`` holds transcripts by policy and seed; ``budget`` is the number of steps that the policies may
    still take; ``invalid`` are actions that the program refused by raising; ``blind`` names the policies
    that do not look; ``tossed`` are the won and played episodes of the least lucky action of a program that
    was found to be a coin; ``plans`` are the solutions by seed.

    Episodes follow each other in one process, which is far cheaper than one process each;
    :meth:`afresh` plays exactly as a run does.
    """

    pool: SandboxPool
    source: str
    turns: int
    settings: ValidatorSettings
    budget: int = 0
    first: dict[int, str] = field(default_factory=dict)
    played: dict[str, dict[int, Transcript]] = field(default_factory=dict)
    opened: Instance | None = None
    toolbox: list[dict[str, Any]] = field(default_factory=list)
    invalid: set[str] = field(default_factory=set)
    metadata: Metadata | None = None
    criteria: int = 0
    hack: str = ""
    blind: list[str] = field(default_factory=lambda: list(BLIND))
    tossed: tuple[float, int] | None = None
    plans: dict[int, list[str]] = field(default_factory=dict)

    @property
    def instance(self) -> Instance:
        assert self.opened is not None
        return self.opened

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"max_turns": self.turns}

    @property
    def transcripts(self) -> list[Transcript]:
        return [transcript for by_seed in self.played.values() for transcript in by_seed.values()]

    def returns(self, policy: str) -> list[float]:
        """Return what the episodes of ``policy`` paid."""
        return [transcript.returned for transcript in self.played.get(policy, {}).values()]

    def rate(self, policy: str) -> float:
        paid = self.returns(policy)
        return sum(paid) / len(paid) if paid else 0.0

    def seeds(self, block: int = 0, count: int = 0) -> Sequence[int]:
        """Return the seeds of one phase; other blocks are other seeds.

        They come from the program's own text and have the range of those of plays: a program cannot tell
        by its seed whether it is judged, and the same program is always judged on the same instances.
        """
        key = hashlib.sha256(f"{self.settings.salt}\x1f{block}\x1f{self.source}".encode("utf-8", "replace"))
        return [_drawn(key.digest(), number) for number in range(count or self.settings.seeds)]

    def actions(self, observation: str) -> tuple[str, ...]:
        """Return what somebody might try who has read ``observation``."""
        if self.toolbox:
            return actions.tool_actions(self.toolbox, observation)
        return actions.plausible(observation)

    async def start(self, seed: int) -> None:
        """Start another process on ``seed`` in place of the one there is. Raises EnvFailure."""
        if self.opened is not None:
            await self.opened.close()
        self.opened = await self.pool.spawn(self.source, seed=seed, kwargs=self.kwargs)
        self.first[seed] = self.opened.first

    async def open(self, seed: int) -> str:
        """Begin an episode on ``seed`` and return the first observation; a used-up process is replaced."""
        try:
            if self.instance.worn:
                await self.start(seed)
            else:
                self.first[seed] = await self.instance.reset(seed)
        except EnvFailure as error:
            raise Rejected("reset", f"reset({seed}): {tell(error)}") from None
        return self.first[seed]

    async def episode(self, seed: int, chosen: Iterator[str]) -> Transcript:
        """Play ``chosen`` from a reset on, outside of all policies."""
        return await play(self.instance, await self.open(seed), chosen)

    async def afresh(self, seed: int, chosen: Sequence[str]) -> Transcript:
        """Play ``chosen`` in a process of its own, as the plays of a run are."""
        async with await self.pool.spawn(
            self.source, seed=seed, kwargs=self.kwargs, apart_from=self.opened
        ) as instance:
            return await play(instance, instance.first, iter(chosen))

    async def plan(self, seed: int) -> list[str]:
        """Return the actions of ``solution()`` on the instance of ``seed``. Raises EnvFailure."""
        if seed not in self.plans:
            await self.open(seed)
            self.plans[seed] = solution_actions(await self.instance.call("solution"))
        return self.plans[seed]

    async def rollout(self, policy: str, seed: int, choose: Choose) -> None:
        """Play one episode by ``choose``, which is given the actions that the first observation suggests.

        An action that the program calls invalid by raising is taken out, and the episode played again.
        """
        for _ in range(_RETRIES):
            if self.budget <= 0:
                return
            first = await self.open(seed)
            known = self.actions(first)
            valid = tuple(action for action in known if action not in self.invalid)
            transcript = await play(self.instance, first, choose(valid or known))
            self.budget -= len(transcript.actions)
            self.played.setdefault(policy, {})[seed] = transcript
            self.judge_error(policy, transcript)
            if not transcript.error or transcript.actions[-1] in self.invalid:
                return
            self.invalid.add(transcript.actions[-1])
            if policy == "constant" or policy.startswith("garbage"):
                return

    def judge_error(self, policy: str, transcript: Transcript) -> None:
        """Reject exceptions that are not the program's way to call an action invalid."""
        if not transcript.error:
            return
        action = transcript.actions[-1]
        meaningless = policy.startswith("garbage") or policy == "babble"
        tolerated = transcript.phase == "step" and transcript.error_type in INVALID_ACTION
        if tolerated and not (meaningless and self.settings.garbage == "strict"):
            return
        advice = _ADVICE if meaningless and transcript.phase == "step" else ""
        raise Rejected("step", f"step({action!r}): {transcript.error}{advice}")


def _drawn(key: bytes, number: int) -> int:
    digest = hashlib.sha256(key + number.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:4], "little") & ((1 << _SEED_BITS) - 1)
