"""The ladder that a program climbs before anybody plays it: named rungs, cheap ones first.

One instance climbs most of it; a second one, from another zygote where there are two, replays what the
first one did. Every rejection carries a reason that the designer can learn from. What a rung found out on
the way (best rate of a policy that does not look) is part of the verdict.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from sandbox import probes
from sandbox.errors import EnvError, EnvFailure
from sandbox.probes import Transcript

if TYPE_CHECKING:
    from sandbox.instance import Instance
    from sandbox.pool import SandboxPool

RUNGS = (
    *(
        "extract",
        "parse",
        "lint",
        "load",
        "reset",
        "step",
        "turns",
        "variation",
        "replay",
        "solution",
        "leak",
    ),
    "accepted",
)
_LOADING = {
    "parse": "parse",
    "lint": "lint",
    "load": "load",
    "init": "load",
    "reset": "reset",
    "contract": "reset",
}
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


BLIND = ("random", "constant", "empty")
_LEAST_EPISODES = 3
_RETRIES = 5
_Choose = Callable[[Sequence[str]], Iterator[str]]


class ValidatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How hard the ladder is.

    ``seeds`` instances are played by each policy; ``probe_steps`` bounds the steps of all probes together.
    ``garbage`` "tolerate" takes ValueError, TypeError, IndexError and KeyError on a meaningless action for
    an invalid action, "strict" rejects any exception. ``variation`` "flag" accepts programs whose seeds
    make no difference. ``require_end`` rejects programs that never end an episode by themselves.
    ``degenerate_rate`` is the win rate of a blind policy from which a program counts as degenerate.
    """

    seeds: int = 6
    replays: int = 2
    probe_steps: int = 600
    max_observation: int = 8000
    garbage: Literal["tolerate", "strict"] = "tolerate"
    variation: Literal["require", "flag"] = "require"
    solution: Literal["check", "ignore"] = "check"
    require_end: bool = False
    degenerate_rate: float = 0.9
    first_seed: int = 1009


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How far a program came. ``rung`` is where it failed, or ``accepted``.

    ``policies`` maps a policy to its win rate, ``trivial_win_rate`` is the best of those that do not look
    (:data:`BLIND`) and ``degenerate`` says that one of them reached the threshold. ``sweep`` tries one
    plausible action after the other, which may be honest work. ``ends`` tells whether the program ended an
    episode within the turns, ``varies`` whether its seed made a difference, ``solvable`` whether anything
    won.
    """

    ok: bool
    rung: str
    reason: str = ""
    trivial_win_rate: float = 0.0
    degenerate: bool = False
    first_observations: tuple[str, ...] = ()
    max_turns: int | None = None
    class_name: str = ""
    policies: dict[str, float] = {}
    ends: bool = False
    varies: bool = False
    solvable: bool = False


class _Rejected(Exception):
    def __init__(self, rung: str, reason: str) -> None:
        super().__init__(reason)
        self.rung, self.reason = rung, reason


@dataclass
class _Climb:
    """What is known about a program so far."""

    source: str
    turns: int
    kwargs: dict[str, Any]
    budget: int
    first: dict[int, str] = field(default_factory=dict)
    played: dict[str, dict[int, Transcript]] = field(default_factory=dict)
    instance: Instance | None = None
    actions: tuple[str, ...] = ()
    invalid: set[str] = field(default_factory=set)
    varies: bool = False
    solved: bool = False

    @property
    def transcripts(self) -> list[Transcript]:
        return [transcript for by_seed in self.played.values() for transcript in by_seed.values()]

    def rate(self, policy: str) -> float:
        results = [transcript.won for transcript in self.played[policy].values()]
        return sum(results) / len(results) if results else 0.0


class Validator:
    """Validates programs in ``pool``; safe to share between tasks."""

    def __init__(self, pool: SandboxPool, settings: ValidatorSettings | None = None) -> None:
        self.pool = pool
        self.settings = settings or ValidatorSettings()

    async def validate(self, source: str, *, max_turns: int = 25) -> Verdict:
        """Return the verdict on ``source`` for episodes of at most ``max_turns`` turns.

        Raises only the ``infra`` errors of the package: a program cannot make it raise.
        """
        climb = _Climb(source, max_turns, {"max_turns": max_turns}, self.settings.probe_steps)
        try:
            await self._climb(climb)
        except _Rejected as rejected:
            return self._verdict(climb, rejected.rung, rejected.reason)
        finally:
            if climb.instance is not None:
                await climb.instance.close()
        return self._verdict(climb, "accepted", "")

    async def _climb(self, climb: _Climb) -> None:
        if not climb.source.strip():
            raise _Rejected("extract", "the completion holds no program")
        await self._load(climb)
        assert climb.instance is not None
        try:
            await self._reset(climb)
            await self._garbage(climb)
            await self._policies(climb)
            self._usable(climb)
            await self._variation(climb)
        except EnvFailure as error:
            raise _Rejected("step", f"{_on(climb)}{_tell(error)}") from None
        await self._replay(climb)
        if self.settings.solution == "check" and "solution" in climb.instance.calls:
            await self._solution(climb)

    async def _load(self, climb: _Climb) -> None:
        seed = self.settings.first_seed
        try:
            climb.instance = await self.pool.spawn(
                climb.source, kwargs=climb.kwargs, reset_seed=seed, lint=True
            )
        except EnvError as error:
            raise _Rejected(_LOADING.get(error.phase, "load"), _tell(error)) from None
        except EnvFailure as error:
            raise _Rejected("load", _tell(error)) from None
        climb.first[seed] = climb.instance.first

    async def _reset(self, climb: _Climb) -> None:
        assert climb.instance is not None
        for seed in self._seeds()[1:3]:
            await self._first(climb, seed)
        for observation in climb.first.values():
            if not observation.strip():
                raise _Rejected("reset", "reset returned an empty observation")
            if len(observation) > self.settings.max_observation:
                raise _Rejected("reset", f"the first observation has {len(observation)} characters")
        climb.actions = probes.plausible(climb.instance.first)

    async def _first(self, climb: _Climb, seed: int) -> str:
        assert climb.instance is not None
        try:
            climb.first[seed] = (await climb.instance.reset(seed)).observation
        except EnvFailure as error:
            raise _Rejected("reset", f"reset({seed}): {_tell(error)}") from None
        return climb.first[seed]

    async def _garbage(self, climb: _Climb) -> None:
        for action in probes.GARBAGE:
            await self._rollout(
                climb, f"garbage {action}", self._seeds()[0], partial(probes.constant, turns=1, action=action)
            )

    async def _policies(self, climb: _Climb) -> None:
        """Play by policies that do not look; the constant is what won most often before."""
        turns = climb.turns
        for k, seed in enumerate(self._seeds()):
            # long episodes: fewer seeds, so that steps are left for the constants
            if k >= _LEAST_EPISODES and climb.budget < self.settings.probe_steps // 2:
                break
            await self._rollout(climb, "sweep", seed, partial(probes.sweep, turns=turns))
            await self._rollout(climb, "random", seed, partial(probes.guess, turns=turns, seed=31 * k + 1))
        winners = Counter(t.actions[-1] for t in climb.transcripts if t.won)
        favourite = winners.most_common(1)[0][0] if winners else climb.actions[0]
        constants = {"constant": favourite, "empty": ""}
        for seed in self._seeds(1):
            for name, action in constants.items():
                await self._rollout(climb, name, seed, partial(probes.constant, turns=turns, action=action))
        for name in self._degenerate(climb):
            # a few lucky episodes are not a verdict: play as many again
            for seed in self._seeds(2):
                choose = partial(probes.guess, turns=turns, seed=seed)
                if name in constants:
                    choose = partial(probes.constant, turns=turns, action=constants[name])
                await self._rollout(climb, name, seed, choose)

    def _degenerate(self, climb: _Climb) -> list[str]:
        """Blind policies that reached the threshold in enough episodes."""
        return [
            name
            for name in BLIND
            if len(climb.played.get(name, ())) >= _LEAST_EPISODES
            and climb.rate(name) >= self.settings.degenerate_rate
        ]

    async def _rollout(self, climb: _Climb, policy: str, seed: int, choose: _Choose) -> None:
        """Play one episode by ``choose``, which is given the actions that the first observation suggests.

        An action that the program calls invalid by raising is taken out, and the episode played again.
        """
        assert climb.instance is not None
        for _ in range(_RETRIES):
            if climb.budget <= 0:
                return
            first = await self._first(climb, seed)
            known = probes.plausible(first)
            valid = tuple(action for action in known if action not in climb.invalid)
            transcript = await probes.play(climb.instance, first, choose(valid or known))
            climb.budget -= len(transcript.actions)
            climb.played.setdefault(policy, {})[seed] = transcript
            self._judge_error(policy, transcript)
            if not transcript.error or transcript.actions[-1] in climb.invalid:
                return
            climb.invalid.add(transcript.actions[-1])

    def _judge_error(self, policy: str, transcript: Transcript) -> None:
        """Reject exceptions that are not the program's way to call an action invalid."""
        if not transcript.error:
            return
        action = transcript.actions[-1]
        meaningless = policy.startswith("garbage") or policy == "empty"
        tolerated = transcript.phase == "step" and transcript.error_type in probes.INVALID_ACTION
        if tolerated and not (meaningless and self.settings.garbage == "strict"):
            return
        raise _Rejected("step", f"step({action!r}): {transcript.error}")

    def _usable(self, climb: _Climb) -> None:
        """Reject a program that never answers, or never ends though it must."""
        played = [
            t
            for name, by_seed in climb.played.items()
            if not name.startswith("garbage")
            for t in by_seed.values()
        ]
        if not any(transcript.steps for transcript in played):
            error = next((t.error for t in played if t.error), "no step was taken")
            raise _Rejected("step", f"step raised for every action that the observation suggests: {error}")
        if self.settings.require_end and not any(transcript.ended for transcript in played):
            raise _Rejected("turns", f"no episode ended within {climb.turns} turns")

    async def _variation(self, climb: _Climb) -> None:
        """The seed must make a difference for the same actions, in what is seen or in what follows."""
        climb.varies = len(set(climb.first.values())) > 1 or any(
            _differ(by_seed.values()) for name, by_seed in climb.played.items() if name != "random"
        )
        start, name = 0, "sweep"
        while not climb.varies and climb.budget > 0:
            # go on with the actions that the longest episode so far did not come to
            start += max(len(transcript.actions) for transcript in climb.played[name].values())
            if start >= len(climb.actions):
                break
            name = f"sweep from {start}"
            choose = partial(probes.sweep, turns=climb.turns, start=start)
            # twice the seeds: a coin drawn from six of them is the same for all every 32nd time
            for seed in (*self._seeds(), *self._seeds(3)):
                await self._rollout(climb, name, seed, choose)
                climb.varies = _differ(climb.played[name].values())
                if climb.varies:
                    break
        if not climb.varies and self.settings.variation == "require":
            raise _Rejected("variation", "every seed gives the same game; draw something from the seed")

    async def _replay(self, climb: _Climb) -> None:
        """What was played must come out byte-equal in a fresh process, whatever was played before."""
        chosen = [(seed, t) for seed, t in climb.played["sweep"].items()][-self.settings.replays :]
        if not chosen or self.settings.replays < 1:
            return
        seed, _ = chosen[-1]
        try:
            other = await self.pool.spawn(
                climb.source, kwargs=climb.kwargs, reset_seed=seed, apart_from=climb.instance
            )
        except EnvFailure as error:
            raise _Rejected("replay", f"loaded once, but not twice: {_tell(error)}") from None
        async with other:
            first = other.first
            for number, (seed, wanted) in enumerate(reversed(chosen)):
                try:
                    if number:
                        first = (await other.reset(seed)).observation
                    again = await probes.play(other, first, iter(wanted.actions))
                except EnvFailure as error:
                    raise _Rejected("replay", f"played once, but not twice: {_tell(error)}") from None
                if again.fingerprint() != wanted.fingerprint():
                    raise _Rejected(
                        "replay", f"seed {seed} and the same actions: {_difference(wanted, again)}"
                    )

    async def _solution(self, climb: _Climb) -> None:
        """A program that offers a solution must be won by it, and must not print it in the question."""
        assert climb.instance is not None
        leaks = 0
        seeds = self._seeds()[:2]
        for seed in seeds:
            first = await self._first(climb, seed)
            try:
                actions = solution_actions(await climb.instance.call("solution"))
                played = await probes.play(
                    climb.instance, first, iter((actions * climb.turns)[: climb.turns])
                )
            except EnvFailure as error:
                raise _Rejected("solution", f"solution(): {_tell(error)}") from None
            if not played.won:
                raise _Rejected(
                    "solution", f"solution() gave {actions[:4]} for seed {seed}, which does not win"
                )
            climb.solved = True
            leaks += leaked(first, actions[-1])
        if leaks == len(seeds):
            raise _Rejected("leak", "the first observation gives the answer away")

    def _seeds(self, block: int = 0) -> Sequence[int]:
        """The seeds of one phase; other blocks are other seeds."""
        first = self.settings.first_seed + 7919 * block
        return range(first, first + self.settings.seeds)

    def _verdict(self, climb: _Climb, rung: str, reason: str) -> Verdict:
        policies = {name: climb.rate(name) for name in ("sweep", *BLIND) if climb.played.get(name)}
        instance = climb.instance
        return Verdict(
            ok=rung == "accepted",
            rung=rung,
            reason=reason[:600],
            trivial_win_rate=max((policies.get(name, 0.0) for name in BLIND), default=0.0),
            degenerate=rung == "accepted" and bool(self._degenerate(climb)),
            first_observations=tuple(climb.first.values())[:3],
            max_turns=instance.max_turns if instance else None,
            class_name=instance.class_name if instance else "",
            policies=policies,
            ends=any(transcript.ended for transcript in climb.transcripts),
            varies=climb.varies,
            solvable=climb.solved or any(transcript.won for transcript in climb.transcripts),
        )


def solution_actions(value: object) -> list[str]:
    """Return the actions that ``solution()`` means: a list's items, the boxed groups of a text, or the text.

    Raises EnvError when there are none.
    """
    if isinstance(value, list):
        actions = [inner(str(item)) for item in value]
    else:
        text = "" if value is None else str(value)
        actions = [group.strip() for group in _BOXED.findall(text)] or [text.strip()]
    if not any(actions):
        raise EnvError("ContractError", "it returned no action", phase="call")
    return actions


def inner(text: str) -> str:
    """The content of the last boxed group, or the text itself."""
    groups = _BOXED.findall(text)
    return (groups[-1] if groups else text).strip()


def leaked(observation: str, action: str) -> bool:
    """Whether the observation is the action, or says outright that it is the answer."""
    if not action:
        return False
    if observation.strip() == action:
        return True
    said = rf"\b(answer|solution|secret|key|target)\b\W{{0,3}}(is|are|=|:)?\W{{0,3}}{re.escape(action)}(?!\w)"
    return re.search(said, observation, re.IGNORECASE) is not None


def _differ(transcripts: Iterable[Transcript]) -> bool:
    """Whether two transcripts part although their actions, as far as they are the same, do not."""
    return any(_parts(one, other) for one, other in itertools.combinations(transcripts, 2))


def _parts(one: Transcript, other: Transcript) -> bool:
    if one.first != other.first:
        return True
    for number, (first, second) in enumerate(zip(one.actions, other.actions, strict=False)):
        if first != second:
            return False
        if one.steps[number : number + 1] != other.steps[number : number + 1]:
            return True
    return False


def _difference(wanted: Transcript, again: Transcript) -> str:
    if wanted.first != again.first:
        return f"first observation {again.first[:80]!r} instead of {wanted.first[:80]!r}"
    for number, (old, new) in enumerate(zip(wanted.steps, again.steps, strict=False), 1):
        if old != new:
            return f"step {number} gave {new.observation[:80]!r} instead of {old.observation[:80]!r}"
    return f"{len(again.steps)} steps instead of {len(wanted.steps)}"


def _tell(error: EnvFailure) -> str:
    if isinstance(error, EnvError) and error.traceback:
        return f"{error} ({error.traceback.splitlines()[-1][:160]})"
    return str(error)


def _on(climb: _Climb) -> str:
    """Name the program's class in a reason, where it is known."""
    return f"{climb.instance.class_name}: " if climb.instance else ""
