"""The ladder that a program climbs before anybody plays it: named rungs, cheap ones first.

One instance climbs most of it; a second one, from another zygote where there are two, replays what the
first one did. Every rejection carries a reason that the designer can learn from. What a rung found out on
the way (best rate of a policy that does not look) is part of the verdict.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio

from sandbox import answer_leak, criteria, metadata, probes, seed_variation, trivial_policies
from sandbox.errors import EnvError, EnvFailure, InfraFailure
from sandbox.probes import Transcript
from sandbox.validation_context import Climb, tell
from sandbox.verdict import BLIND, RUNGS, Episode, Rejected, ValidatorSettings, Verdict

if TYPE_CHECKING:
    from sandbox.frames import StepResult
    from sandbox.instance import Instance
    from sandbox.pool import SandboxPool

__all__ = ["BLIND", "RUNGS", "Judge", "Validator", "ValidatorSettings", "Verdict"]

# Given the source and the verdict so far, says "" to accept or why not.
Judge = Callable[[str, Verdict], Awaitable[str]]

_LOADING = {
    "parse": "parse",
    "lint": "lint",
    "load": "load",
    "init": "load",
    "reset": "reset",
    "contract": "reset",
}
_ADVICE = "; reset must set everything, and nothing may depend on earlier episodes, addresses or clocks"
_BY_HEART = "always the same plan"
_REQUIRED = ("skill", "difficulty", "max_turns")


class Validator:
    """Validates programs in ``pool``; safe to share between tasks.

    ``judge`` is a last check by the caller, for what no probe can see. It fails closed: an exception, a
    delay beyond ``judge_seconds`` or an answer that is not a text rejects the program.
    Only InfraFailure goes through to the caller, who may try again.
    """

    def __init__(
        self, pool: SandboxPool, settings: ValidatorSettings | None = None, *, judge: Judge | None = None
    ) -> None:
        self.pool, self.judge = pool, judge
        self.settings = settings or ValidatorSettings()

    async def validate(self, source: str, *, max_turns: int = 25) -> Verdict:
        """Return the verdict on ``source`` for episodes of at most ``max_turns`` turns.

        Raises only the ``infra`` errors of the package: a program cannot make it raise.
        """
        climb = Climb(source, max_turns, self.settings, budget=self.settings.probe_steps)
        try:
            await self._climb_in_time(climb)
            await self._ask(climb)
        except Rejected as rejected:
            return _verdict(climb, rejected.rung, rejected.reason)
        finally:
            if climb.opened is not None:
                await climb.opened.close()
        return _verdict(climb, "accepted", "")

    async def _climb_in_time(self, climb: Climb) -> None:
        seconds = self.settings.seconds
        with anyio.move_on_after(seconds) as scope:
            await self._climb(climb)
        if scope.cancelled_caught:
            raise Rejected("step", f"its episodes could not be played within {seconds:g} s")

    async def _climb(self, climb: Climb) -> None:
        if not climb.source.strip():
            raise Rejected("extract", "the completion holds no program")
        await self._load(climb)
        self._metadata(climb)
        await _reset(climb)
        try:
            if climb.instance.tools:
                await criteria.examine(climb)
            await _garbage(climb)
            await trivial_policies.play_policies(climb)
            self._usable(climb)
            await seed_variation.vary(climb)
        except EnvFailure as error:
            raise Rejected("step", f"{climb.instance.class_name}: {tell(error)}") from None
        if not climb.varies and self.settings.variation == "require":
            raise Rejected("variation", "every seed gives the same game; draw something from the seed")
        chosen = _chosen(climb)
        async with self._second(climb, chosen) as other:
            await _play_again(other, chosen, begun=True)
            if self.settings.solution == "check" and "solution" in climb.instance.calls:
                await _solution(climb)
                await _play_again(other, [*climb.played["solution"].items()])
        await _leak(climb)
        if climb.hack and self.settings.degenerate == "reject":
            raise Rejected("trivial", climb.hack)

    async def _load(self, climb: Climb) -> None:
        seed = climb.seeds()[0]
        try:
            await self.pool.lint(climb.source)
            climb.opened = await self.pool.spawn(climb.source, seed=seed, kwargs=climb.kwargs)
        except EnvError as error:
            raise Rejected(_LOADING.get(error.phase, "load"), tell(error) + _advice(climb, error)) from None
        except EnvFailure as error:
            raise Rejected("load", tell(error)) from None
        climb.first[seed] = climb.instance.first

    def _metadata(self, climb: Climb) -> None:
        """What is declared must be well-formed and true; whether it must be there is a setting."""
        if self.settings.metadata == "ignore":
            return
        try:
            found = metadata.read(climb.instance.declared)
        except metadata.Wrong as error:
            raise Rejected("metadata", str(error)) from None
        if self.settings.metadata == "require":
            missing = [name for name in _REQUIRED if getattr(found, name, None) is None]
            missing += [] if found and (found.goal or found.win) else ["goal"]
            if missing:
                raise Rejected("metadata", f"METADATA must declare {', '.join(missing)}")
        if found is None:
            return
        climb.metadata = found
        untrue = metadata.contradiction(found, offered=climb.turns, observed=climb.instance.max_turns)
        if untrue:
            raise Rejected("metadata", untrue)

    def _usable(self, climb: Climb) -> None:
        """Reject a program that never answers, does not keep its turn limit, or never ends though it must."""
        played = [
            t
            for name, by_seed in climb.played.items()
            if not name.startswith("garbage")
            for t in by_seed.values()
        ]
        if not any(transcript.steps for transcript in played):
            error = next((t.error for t in played if t.error), "no step was taken")
            raise Rejected("step", f"step raised for every action that the observation suggests: {error}")
        limit = climb.metadata.max_turns if climb.metadata else None
        limit = limit or climb.instance.max_turns
        if limit and max(len(transcript.steps) for transcript in played) > limit:
            raise Rejected("turns", f"max_turns is {limit}, but the episode goes on after turn {limit}")
        if self.settings.require_end and not any(transcript.ended for transcript in played):
            raise Rejected("turns", f"no episode ended within {climb.turns} turns")

    @asynccontextmanager
    async def _second(
        self, climb: Climb, chosen: list[tuple[int, Transcript]]
    ) -> AsyncIterator[Instance | None]:
        """Another instance, begun as the first of ``chosen`` in a process that has seen nothing yet; None
        when nothing is to be replayed.
        """
        if not chosen:
            yield None
            return
        try:
            other = await self.pool.spawn(
                climb.source, seed=chosen[0][0], kwargs=climb.kwargs, apart_from=climb.instance
            )
        except EnvFailure as error:
            raise Rejected("replay", f"loaded once, but not twice: {tell(error)}") from None
        async with other:
            yield other

    async def _ask(self, climb: Climb) -> None:
        """The caller's own check, which fails closed."""
        if self.judge is None:
            return
        try:
            with anyio.fail_after(self.settings.judge_seconds):
                answer = await self.judge(climb.source, _verdict(climb, "accepted", ""))
        except InfraFailure:
            raise
        except Exception as error:
            raise Rejected("judge", f"the check gave no verdict: {type(error).__name__}: {error}") from error
        if not isinstance(answer, str):
            raise Rejected("judge", f"the check gave no verdict, but a {type(answer).__name__}")
        if answer:
            raise Rejected("judge", answer)


def _advice(climb: Climb, error: EnvError) -> str:
    """What to do about an error that beginners make."""
    if error.phase == "parse" and climb.source.count("```") % 2:
        return "; a code block (```) is opened and not closed: the reply may have been cut off"
    if error.phase == "parse" and "```" in climb.source:
        return "; only the program belongs here, without ``` and without prose"
    if error.phase == "init" and error.type == "TypeError" and "required" in error.message:
        return "; the constructor is called with max_turns only, so everything else needs a default"
    return ""


async def _reset(climb: Climb) -> None:
    for seed in climb.seeds()[1:3]:
        await climb.open(seed)
    for observation in climb.first.values():
        if not observation.strip():
            raise Rejected("reset", "reset returned an empty observation")
        if len(observation) > climb.settings.max_observation:
            raise Rejected("reset", f"the first observation has {len(observation)} characters")


async def _garbage(climb: Climb) -> None:
    seed = climb.seeds()[0]
    for action in probes.GARBAGE_CALLS if climb.instance.tools else probes.GARBAGE:
        choose = partial(probes.constant, turns=1, action=action)
        await climb.rollout(f"garbage {action}", seed, choose)


def _chosen(climb: Climb) -> list[tuple[int, Transcript]]:
    """What is replayed: an episode of each kind of policy, those that do not look first.

    Plays have a process of their own for each episode; what pays only there shows in the first one.
    """
    if climb.settings.replays < 1:
        return []
    played = [climb.played.get(name, {}) for name in climb.blind]
    last = [[pair for pair in by_seed.items() if pair[1].steps][-1:] for by_seed in played]
    return [*itertools.chain(*last), *[*climb.played["sweep"].items()][-climb.settings.replays :]]


async def _play_again(
    other: Instance | None, chosen: list[tuple[int, Transcript]], *, begun: bool = False
) -> None:
    """What was played must come out byte-equal in another process, whatever was played before."""
    if other is None:
        return
    for number, (seed, wanted) in enumerate(chosen):
        try:
            first = other.first if begun and number == 0 else (await other.reset(seed)).observation
            again = await probes.play(other, first, iter(wanted.actions))
        except EnvFailure as error:
            raise Rejected("replay", f"played once, but not twice: {tell(error)}") from None
        if again.fingerprint() != wanted.fingerprint():
            told = "the same seed and actions in a process of its own"
            raise Rejected("replay", f"{told}, seed {seed}: {_difference(wanted, again)}{_ADVICE}")


async def _solution(climb: Climb) -> None:
    """A program that offers a solution must be won by it."""
    plans: list[list[str]] = []
    for seed in climb.seeds()[:3]:
        await climb.open(seed)
        try:
            actions = probes.solution_actions(await climb.instance.call("solution"))
            # begun again: asking must not change the game
            first = await climb.open(seed)
            repeated = actions if climb.instance.tools else actions * climb.turns
            played = await probes.play(climb.instance, first, iter(repeated[: climb.turns]))
        except EnvFailure as error:
            raise Rejected("solution", f"solution(): {tell(error)}") from None
        if not played.won:
            pays = f"pays {played.returned:g}, which does not win"
            raise Rejected("solution", f"solution() gave {actions[:4]} for seed {seed}: it {pays}")
        climb.solved = True
        climb.played.setdefault("solution", {})[seed] = played
        plans.append(actions)
    if not climb.hack and all(plan == plans[0] for plan in plans):
        await _same_plan(climb, plans[0])


async def _same_plan(climb: Climb, plan: list[str]) -> None:
    """A plan that wins everywhere can be learned by heart."""
    for seed in (*climb.seeds(1), *climb.seeds(2)):
        played = await climb.episode(seed, iter(plan[: climb.turns]))
        climb.played.setdefault(_BY_HEART, {})[seed] = played
        if not played.won:
            return
    climb.blind.append(_BY_HEART)
    climb.hack = trivial_policies.paid(climb, _BY_HEART, f"{_BY_HEART} {plan[:4]}")


async def _leak(climb: Climb) -> None:
    """The first observation must not give the winning action away."""
    solved = climb.played.get("solution", {}).values()
    if solved and all(answer_leak.said(played.first, played.actions[-1]) for played in solved):
        raise Rejected("leak", "the first observation gives the answer away")
    try:
        place = await answer_leak.copy_wins(climb)
    except EnvFailure as error:
        raise Rejected("step", tell(error)) from None
    if place:
        raise Rejected("leak", place)


def _verdict(climb: Climb, rung: str, reason: str) -> Verdict:
    policies = {name: climb.rate(name) for name in ("sweep", *climb.blind) if climb.played.get(name)}
    best = max((name for name in climb.blind if name in policies), key=climb.rate, default="")
    won, played = climb.wins(best) if climb.tossed is None else climb.tossed
    if climb.tossed is not None:
        policies["coin"] = won / played
    instance = climb.opened
    return Verdict(
        ok=rung == "accepted",
        rung=rung,
        reason=reason[:600],
        trivial_win_rate=won / played if played else 0.0,
        trivial_interval=trivial_policies.interval(won, played),
        degenerate=rung in ("accepted", "trivial", "judge") and bool(climb.hack),
        hack=climb.hack,
        first_observations=tuple(climb.first.values())[:3],
        max_turns=instance.max_turns if instance else None,
        class_name=instance.class_name if instance else "",
        policies=policies,
        ends=any(transcript.ended for transcript in climb.transcripts),
        varies=climb.varies,
        solvable=climb.solved or any(transcript.won for transcript in climb.transcripts),
        tools=bool(instance and instance.tools),
        criteria=climb.criteria,
        metadata=climb.metadata,
        episodes=tuple(
            Episode(policy, seed, transcript)
            for policy, by_seed in climb.played.items()
            for seed, transcript in by_seed.items()
        ),
    )


def _difference(wanted: Transcript, again: Transcript) -> str:
    if wanted.first != again.first:
        return f"first observation {again.first[:80]!r} instead of {wanted.first[:80]!r}"
    for number, (old, new) in enumerate(zip(wanted.steps, again.steps, strict=False), 1):
        if old.observation != new.observation:
            return f"step {number} gave {new.observation[:80]!r} instead of {old.observation[:80]!r}"
        if old != new:
            return f"step {number} gave {_outcome(new)} instead of {_outcome(old)}"
    return f"{len(again.steps)} steps instead of {len(wanted.steps)}"


def _outcome(step: StepResult) -> str:
    return f"reward {step.reward:g}, flags {step.terminated} and {step.truncated}, info {step.info}"
