"""The ladder of checks that a program passes before anybody plays it: named rungs, cheap ones first.

Most of it is played in one process; what was played there is played again in processes of their own, exactly
as the plays of a run are. Every rejection carries a reason that the designer can learn from, and the findings
of the rungs (the best rate of a policy that does not look) are part of the verdict.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from sandbox import answer_leak, criteria, luck, metadata, seed_variation, trivial_policies
from sandbox.errors import EnvError, EnvFailure
from sandbox.probes import Transcript, tell
from sandbox.trial import Rejected, Trial
from sandbox.verdict import REASON_CHARACTERS, Episode, ValidatorSettings, Verdict

if TYPE_CHECKING:
    from sandbox.frames import StepResult
    from sandbox.pool import SandboxPool


# A rung of the caller's. It is given the program, its ticket (whatever the caller passed) and the verdict so
# far, and returns the verdict with its findings filled in, or raises Rejected.
Check = Callable[[str, Any, Verdict], Awaitable[Verdict]]

# The rungs of errors by phase; all others are of loading.
_LOADING = {"parse": "parse", "lint": "lint", "reset": "reset", "contract": "reset"}
_ADVICE = "; reset must set everything, and nothing may depend on earlier episodes, addresses or clocks"
_ALONE, _LONGEST_FIRST = 3, 8000


class Validator:
    """Validates programs in ``pool``; safe to share between tasks.

    ``checks`` are rungs of the caller's own, climbed after those of this package.
    """

    def __init__(
        self,
        pool: SandboxPool,
        settings: ValidatorSettings | None = None,
        *,
        checks: Sequence[Check] = (),
    ) -> None:
        self.pool, self.checks = pool, tuple(checks)
        self.settings = settings or ValidatorSettings()

    async def validate(self, source: str, ticket: Any = None, *, max_turns: int = 25) -> Verdict:
        """Return the verdict on ``source``, for episodes of at most ``max_turns`` turns.

        ``ticket`` goes to the checks as it is. Raises the ``infra`` errors of the package and what a check
        raises, and nothing else: a program cannot make it raise.
        """
        trial = Trial(self.pool, source, max_turns, self.settings, budget=self.settings.probe_steps)
        verdict = None
        try:
            with anyio.move_on_after(self.settings.seconds) as scope:
                await self._climb(trial)
            if scope.cancelled_caught:
                limit = self.settings.seconds
                raise Rejected("step", f"its episodes could not be played within {limit:g} s")
            verdict = _verdict(trial, "accepted", "")
            for check in self.checks:
                verdict = await check(source, ticket, verdict)
        except Rejected as rejected:
            if verdict is None:
                return _verdict(trial, rejected.rung, rejected.reason)
            reason = rejected.reason[:REASON_CHARACTERS]
            return msgspec.structs.replace(verdict, ok=False, rung=rejected.rung, reason=reason)
        finally:
            if trial.opened is not None:
                await trial.opened.close()
        return verdict

    async def _climb(self, trial: Trial) -> None:
        if not trial.source.strip():
            raise Rejected("extract", "the completion holds no program")
        await _load(trial)
        try:
            if trial.instance.tools:
                await criteria.examine(trial)
            await trivial_policies.play_policies(trial)
            _usable(trial)
            if not await seed_variation.varies(trial):
                raise Rejected("variation", "every seed gives the same game; draw something from the seed")
            await _solution(trial)
        except EnvFailure as error:
            raise Rejected("step", f"{trial.instance.class_name}: {tell(error)}") from None
        await _replay(trial)
        await _leak(trial)
        if trial.hack and self.settings.degenerate == "reject":
            raise Rejected("trivial", trial.hack)


async def _load(trial: Trial) -> None:
    """Start the program; check its declaration and its first observations."""
    try:
        await trial.pool.lint(trial.source)
        await trial.start(trial.seeds()[0])
    except EnvError as error:
        raise Rejected(_LOADING.get(error.phase, "load"), tell(error) + _advice(trial, error)) from None
    except EnvFailure as error:
        raise Rejected("load", tell(error)) from None
    instance = trial.instance
    try:
        trial.metadata = metadata.read(instance.declared, offered=trial.turns, observed=instance.max_turns)
    except metadata.MetadataError as error:
        raise Rejected("metadata", str(error)) from None
    for seed in trial.seeds()[1:3]:
        await trial.open(seed)
    for observation in trial.first.values():
        if not observation.strip():
            raise Rejected("reset", "reset returned an empty observation")
        if len(observation) > _LONGEST_FIRST:
            raise Rejected("reset", f"the first observation has {len(observation)} characters")


def _usable(trial: Trial) -> None:
    """Reject a program that never answers, or does not keep its turn limit."""
    played = [
        transcript
        for name, by_seed in trial.played.items()
        if not name.startswith("garbage")
        for transcript in by_seed.values()
    ]
    if not any(transcript.steps for transcript in played):
        error = next((transcript.error for transcript in played if transcript.error), "no step was taken")
        raise Rejected("step", f"step raised for every action that the observation suggests: {error}")
    limit = trial.metadata.max_turns if trial.metadata else None
    limit = limit or trial.instance.max_turns
    if limit and max(len(transcript.steps) for transcript in played) > limit:
        raise Rejected("turns", f"max_turns is {limit}, but the episode goes on after turn {limit}")


async def _solution(trial: Trial) -> None:
    if "solution" in trial.instance.calls:
        await luck.check_solution(trial)
        if not trial.hack:
            await luck.play_wrong_plans(trial)
    elif trial.settings.solution == "require":
        raise Rejected(
            "solution",
            f"{trial.instance.class_name} has no method solution(); add one that returns the list of "
            "actions that win the instance just reset",
        )
    if not trial.hack and not trial.instance.tools:
        await luck.play_luck(trial)


def _advice(trial: Trial, error: EnvError) -> str:
    """Return what to do about an error that beginners make."""
    if error.phase == "parse" and trial.source.count("```") % 2:
        return "; a code block (```) is opened and not closed: the reply may have been cut off"
    if error.phase == "parse" and "```" in trial.source:
        return "; only the program belongs here, without ``` and without prose"
    if error.phase == "init" and error.type == "TypeError" and "required" in error.message:
        return "; the constructor is called with max_turns only, so everything else needs a default"
    return ""


async def _replay(trial: Trial) -> None:
    """Play an episode of each policy again, each in a process of its own: it must come out the same.

    The plays of a run have a process for each episode, so a program that pays only there shows here.
    """
    if trial.settings.replays < 1:
        return
    last = {
        name: [pair for pair in by_seed.items() if pair[1].steps] for name, by_seed in trial.played.items()
    }
    chosen = [last[name][-1:] for name in last if not name.startswith(("scan", "sweep"))]
    for seed, wanted in itertools.chain(*chosen, last.get("sweep", [])[-trial.settings.replays :]):
        try:
            again = await trial.afresh(seed, wanted.actions)
        except EnvFailure as error:
            raise Rejected("replay", f"played once, but not twice: {tell(error)}") from None
        if again.fingerprint() != wanted.fingerprint():
            same = "the same seed and actions in a process of its own"
            raise Rejected("replay", f"{same}, seed {seed}: {_difference(wanted, again)}{_ADVICE}")


async def _leak(trial: Trial) -> None:
    """Reject a program whose first observation gives the winning action away.

    The last action of a few won episodes is then played alone: a hint must not say what wins at once.
    """
    solved = trial.played.get("solution", {}).values()
    if solved and all(answer_leak.said(played.first, played.actions[-1]) for played in solved):
        raise Rejected("leak", "the first observation gives the answer away")
    # what is paid without looking is paid for a copied word as well
    if not trial.hack:
        try:
            place = await answer_leak.copy_wins(trial)
        except EnvFailure as error:
            raise Rejected("step", tell(error)) from None
        if place:
            raise Rejected("leak", place)
    won: dict[int, Transcript] = {}
    for by_seed in trial.played.values():
        for seed, played in by_seed.items():
            if played.won and len(played.actions) <= len(won.get(seed, played).actions):
                won[seed] = played
    for seed, played in [pair for pair in won.items() if len(pair[1].actions) > 1][:_ALONE]:
        alone = await trial.episode(seed, iter(played.actions[-1:]))
        trial.played.setdefault("last action", {})[seed] = alone


def _verdict(trial: Trial, rung: str, reason: str) -> Verdict:
    policies = {name: trial.rate(name) for name in ("sweep", *trial.blind) if trial.played.get(name)}
    best = max((name for name in trial.blind if name in policies), key=trial.rate, default="")
    won, played = trial.tossed or (sum(trial.returns(best)), len(trial.returns(best)))
    if trial.tossed is not None:
        policies["coin"] = won / played
    instance = trial.opened
    return Verdict(
        ok=rung == "accepted",
        rung=rung,
        reason=reason[:REASON_CHARACTERS],
        trivial_win_rate=won / played if played else 0.0,
        trivial_interval=trivial_policies.interval(won, played),
        degenerate=rung in ("accepted", "trivial") and bool(trial.hack),
        hack=trial.hack,
        first_observations=tuple(trial.first.values())[:3],
        max_turns=instance.max_turns if instance else None,
        class_name=instance.class_name if instance else "",
        policies=policies,
        ends=any(transcript.ended for transcript in trial.transcripts),
        solvable=any(transcript.won for transcript in trial.transcripts),
        tools=bool(instance and instance.tools),
        criteria=trial.criteria,
        metadata=trial.metadata,
        episodes=tuple(
            Episode(policy, seed, transcript)
            for policy, by_seed in trial.played.items()
            for seed, transcript in by_seed.items()
        ),
    )


def _difference(wanted: Transcript, again: Transcript) -> str:
    if wanted.first != again.first:
        return f"first observation {again.first[:80]!r} instead of {wanted.first[:80]!r}"
    for number, (old, new) in enumerate(zip(wanted.steps, again.steps, strict=False), 1):
        if old.observation != new.observation:
            return f"step {number} gave {new.observation[:80]!r} instead of {old.observation[:80]!r}"
        if _outcome(old) != _outcome(new):
            return f"step {number} gave {_outcome(new)} instead of {_outcome(old)}"
    if len(again.steps) == len(wanted.steps):
        return f"{again.error or 'no error'} instead of {wanted.error or 'no error'}"
    return f"{len(again.steps)} steps instead of {len(wanted.steps)}"


def _outcome(step: StepResult) -> str:
    return f"reward {step.reward:g}, flags {step.terminated} and {step.truncated}"
