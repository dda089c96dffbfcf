"""What is known about a program while it climbs the ladder, and how its episodes are played."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sandbox import probes
from sandbox.errors import EnvError, EnvFailure
from sandbox.probes import Transcript
from sandbox.verdict import BLIND, Rejected, ValidatorSettings

if TYPE_CHECKING:
    from sandbox.instance import Instance
    from sandbox.metadata import Metadata

RETRIES = 5
# Policies that would only play the refused action again.
SAME = ("constant", "empty", "nonsense")
_SEED_BITS = 31  # as many as the seeds of plays have
Choose = Callable[[Sequence[str]], Iterator[str]]


@dataclass
class Climb:
    """One program under validation. ``played`` holds transcripts by policy and seed; ``budget`` is what is
    left of the probes' steps; ``invalid`` are actions that the program refused by raising; ``blind`` names
    the policies that do not look; ``tossed`` are the won and played episodes of the least lucky action of a
    program that was found to be a coin.
    """

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
    varies: bool = False
    solved: bool = False
    hack: str = ""
    blind: list[str] = field(default_factory=lambda: list(BLIND))
    tossed: tuple[float, int] | None = None

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

    def wins(self, policy: str) -> tuple[float, int]:
        """What the episodes of ``policy`` paid together (won ones, where nothing pays in part), and how
        many they are.
        """
        results = [transcript.returned for transcript in self.played.get(policy, {}).values()]
        return sum(results), len(results)

    def rate(self, policy: str) -> float:
        won, played = self.wins(policy)
        return won / played if played else 0.0

    def seeds(self, block: int = 0, count: int = 0) -> Sequence[int]:
        """The seeds of one phase; other blocks are other seeds.

        They come from the program's own text and have the range of those of plays: a program cannot tell
        by its seed whether it is judged, and the same program is always judged on the same instances.
        """
        key = hashlib.sha256(f"{self.settings.salt}\x1f{block}\x1f{self.source}".encode("utf-8", "replace"))
        return [_drawn(key.digest(), number) for number in range(count or self.settings.seeds)]

    def actions(self, observation: str) -> tuple[str, ...]:
        """What somebody might try who has read ``observation``."""
        if self.toolbox:
            return probes.tool_actions(self.toolbox, observation)
        return probes.plausible(observation)

    async def open(self, seed: int) -> str:
        """Reset with ``seed`` and return the first observation."""
        try:
            self.first[seed] = (await self.instance.reset(seed)).observation
        except EnvFailure as error:
            raise Rejected("reset", f"reset({seed}): {tell(error)}") from None
        return self.first[seed]

    async def episode(self, seed: int, actions: Iterator[str]) -> Transcript:
        """Play ``actions`` from a reset on, outside of all policies."""
        return await probes.play(self.instance, await self.open(seed), actions)

    async def rollout(self, policy: str, seed: int, choose: Choose) -> None:
        """Play one episode by ``choose``, which is given the actions that the first observation suggests.

        An action that the program calls invalid by raising is taken out, and the episode played again.
        """
        for _ in range(RETRIES):
            if self.budget <= 0:
                return
            first = await self.open(seed)
            known = self.actions(first)
            valid = tuple(action for action in known if action not in self.invalid)
            transcript = await probes.play(self.instance, first, choose(valid or known))
            self.budget -= len(transcript.actions)
            self.played.setdefault(policy, {})[seed] = transcript
            self.judge_error(policy, transcript)
            if not transcript.error or transcript.actions[-1] in self.invalid:
                return
            self.invalid.add(transcript.actions[-1])
            if policy in SAME or policy.startswith("garbage"):
                return

    def judge_error(self, policy: str, transcript: Transcript) -> None:
        """Reject exceptions that are not the program's way to call an action invalid."""
        if not transcript.error:
            return
        action = transcript.actions[-1]
        meaningless = policy.startswith("garbage") or policy in ("empty", "nonsense")
        tolerated = transcript.phase == "step" and transcript.error_type in probes.INVALID_ACTION
        if tolerated and not (meaningless and self.settings.garbage == "strict"):
            return
        raise Rejected("step", f"step({action!r}): {transcript.error}")


def _drawn(key: bytes, number: int) -> int:
    digest = hashlib.sha256(key + number.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:4], "little") & ((1 << _SEED_BITS) - 1)


def tell(error: EnvFailure) -> str:
    """The error with the program's line where it is known."""
    if isinstance(error, EnvError) and error.traceback:
        return f"{error} ({error.traceback.splitlines()[-1][:160]})"
    return str(error)
