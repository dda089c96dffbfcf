"""What a few more steps tell about an accepted program: which actions win by themselves, inside of what the
text says and outside of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from roles.designer import text_claims
from sandbox.errors import EnvError, EnvFailure
from sandbox.probes import Transcript

if TYPE_CHECKING:
    from sandbox.frames import StepResult
    from sandbox.verdict import Episode, Verdict

_INSTANCES, _BEYOND, _WIDEST, _WINS = 6, 3, 1000, 3
_LONGEST = 20


class Begun(Protocol):
    """What is used of the beginning of an episode."""

    @property
    def observation(self) -> str: ...


class Playable(Protocol):
    """What is used of a sandbox instance."""

    async def reset(self, seed: int) -> Begun: ...

    async def step(self, action: str) -> StepResult: ...

    async def close(self) -> None: ...


class Host(Protocol):
    """What is used of a sandbox pool."""

    async def spawn(
        self, source: str, *, seed: int = 0, kwargs: dict[str, object] | None = None
    ) -> Playable: ...


class Answers(NamedTuple):
    """How instances are won. ``alone``: the action that wins an instance at once, one entry an instance;
    ``plans``: longer solutions; ``actions``: what the program was seen to take; ``instances`` counts those
    that were played.
    """

    alone: tuple[str, ...] = ()
    plans: tuple[tuple[str, ...], ...] = ()
    actions: frozenset[str] = frozenset()
    instances: int = 0


class Seen(NamedTuple):
    """``outside`` says which action wins though the text excludes it, "" for none."""

    answers: Answers = Answers()
    outside: str = ""


async def probe(host: Host, source: str, verdict: Verdict, *, max_turns: int, seed: int) -> Seen:
    """Play some more, on instances from ``seed`` on, which no program can foresee. Raises the sandbox's infra
    errors; a program that breaks is seen no further.
    """
    wins = _wins(verdict.episodes)
    spans = {text_claims.answers(first) for first in verdict.first_observations}
    worth = any(span and span[1] - span[0] <= _WIDEST for span in spans)
    candidates = {seed: actions[-1] for seed, actions in wins.items() if len(actions) > 1}
    known = [actions[-1] for actions in wins.values() if len(actions) == 1]
    outside = ""
    if worth or candidates:
        try:
            instance = await host.spawn(source, seed=seed, kwargs={"max_turns": max_turns})
        except EnvFailure:
            return Seen(_answers(verdict.episodes, known))
        try:
            for played, action in list(candidates.items())[:_WINS]:
                if await _wins_alone(instance, played, action):
                    known.append(action)
            if worth:
                outside = await _outside(instance, seed, {at: actions[-1] for at, actions in wins.items()})
        except EnvFailure:
            pass
        finally:
            await instance.close()
    return Seen(_answers(verdict.episodes, known), outside)


async def _outside(instance: Playable, first: int, known: dict[int, str]) -> str:
    """Play numbers outside of the range that is said: what was seen to win the instances ``known``, and the
    next ones, on instances of their own. One that wins where none inside does is proof.
    """
    for seed in [*list(known)[:_WINS], *range(first, first + _INSTANCES)]:
        text = (await instance.reset(seed)).observation
        span = text_claims.answers(text)
        if span is None or span[1] - span[0] > _WIDEST or (seed in known and not text_claims.asked(text)):
            continue
        low, high = span
        beyond = [known[seed]] if seed in known else map(str, [*range(high + 1, high + 1 + _BEYOND), low - 1])
        beyond = [action for action in beyond if _is_outside(action, low, high)]
        winner = await _first_win(instance, beyond)
        if winner is None or not await _wins_alone(instance, seed, winner):
            continue
        inside = map(str, range(low, high + 1))
        if not any([await _wins_alone(instance, seed, action) for action in inside]):
            return f"it says {low} to {high}, but {winner} wins and none of them does"
    return ""


def _is_outside(action: str, low: int, high: int) -> bool:
    return len(action) < _LONGEST and action.removeprefix("-").isdecimal() and not low <= int(action) <= high


async def _first_win(instance: Playable, actions: Iterable[str]) -> str | None:
    for action in actions:
        result = await _step(instance, action)
        if result is None or result.done:
            return action if result is not None and _pays(action, result) else None
    return None


async def _wins_alone(instance: Playable, seed: int, action: str) -> bool:
    await instance.reset(seed)
    result = await _step(instance, action)
    return result is not None and _pays(action, result)


async def _step(instance: Playable, action: str) -> StepResult | None:
    """None for an action that the program refuses by raising."""
    try:
        return await instance.step(action)
    except EnvError:
        return None


def _pays(action: str, result: StepResult) -> bool:
    return Transcript("", (action,), (result,)).won


def _wins(episodes: Iterable[Episode]) -> dict[int, tuple[str, ...]]:
    """The shortest win of each instance."""
    found: dict[int, tuple[str, ...]] = {}
    for episode in episodes:
        actions = episode.transcript.actions
        if episode.transcript.won and len(actions) < len(found.get(episode.seed, (*actions, ""))):
            found[episode.seed] = actions
    return found


def _answers(episodes: Sequence[Episode], alone: list[str]) -> Answers:
    plans, taken = dict[tuple[str, ...], None](), set[str]()
    for episode in episodes:
        played = episode.transcript
        taken.update(played.actions[: len(played.steps)])
        if episode.policy == "solution" and played.won and len(played.actions) > 1:
            plans[played.actions] = None
    return Answers(tuple(alone), tuple(plans), frozenset(taken), len({episode.seed for episode in episodes}))
