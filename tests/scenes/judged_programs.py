"""Verdicts on trusted test programs, which are played in this process instead of the sandbox."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sandbox import actions
from sandbox.errors import EnvError
from sandbox.frames import StepResult
from sandbox.metadata import Metadata
from sandbox.probes import Transcript
from sandbox.verdict import Episode, Verdict

_FIELD = re.compile(r"^(title|skill|idea|win): (.+)$", re.MULTILINE)


class Program:
    """An object of the only class of a source whose name ends in Env."""

    def __init__(self, source: str, max_turns: int = 12) -> None:
        names: dict[str, Any] = {}
        exec(source, names)
        made = next(value for name, value in names.items() if name.endswith("Env"))
        self._object = made(max_turns=max_turns) if "max_turns" in source else made()

    def reset(self, seed: int) -> str:
        first = self._object.reset(seed=seed)
        return first if isinstance(first, str) else first[0]

    def step(self, action: str) -> StepResult:
        try:
            return StepResult(*self._object.step(action)[:4])
        except Exception as error:
            raise EnvError(type(error).__name__, str(error)) from error

    @property
    def solution(self) -> list[str] | None:
        return self._object.solution() if hasattr(self._object, "solution") else None


def episode(program: Program, first: str, actions: Iterator[str]) -> Transcript:
    taken, steps = list[str](), list[StepResult]()
    for action in actions:
        taken.append(action)
        try:
            steps.append(program.step(action))
        except EnvError as error:
            return Transcript(first, tuple(taken), tuple(steps), str(error), error.type, "step")
        if steps[-1].done:
            break
    return Transcript(first, tuple(taken), tuple(steps))


def judged(source: str, *, turns: int = 12, seeds: int = 6) -> Verdict:
    """Return an accepting verdict with the episodes that the ladder would have seen."""
    program = Program(source, turns)
    episodes, firsts = list[Episode](), list[str]()
    for seed in range(1009, 1009 + seeds):
        first = program.reset(seed)
        firsts.append(first)
        plausible = list(actions.plausible(first))
        refused = set[str]()
        for action in plausible:
            program.reset(seed)
            if episode(program, first, iter([action])).error:
                refused.add(action)
        valid = [action for action in plausible if action not in refused]
        players = {
            "sweep": actions.sweep(valid, turns),
            "random": actions.guess(valid, turns, seed),
            "constant": actions.constant(valid, turns, valid[len(valid) // 2]),
            "garbage banana": iter(["banana"]),
        }
        program.reset(seed)
        if program.solution is not None:
            players["solution"] = iter(program.solution)
        for policy, chosen in players.items():
            first = program.reset(seed)
            episodes.append(Episode(policy, seed, episode(program, first, chosen)))
    declared = dict(_FIELD.findall(source.partition("import")[0]))
    return Verdict(
        ok=True,
        rung="accepted",
        first_observations=tuple(firsts[:3]),
        metadata=Metadata(**declared) if declared else None,
        episodes=tuple(episodes),
    )
