"""Trusted test programs, played in this process the way the ladder plays programs in the sandbox."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import anyio.lowlevel

from sandbox import actions as probes
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
            return StepResult(*self._object.step(action))
        except Exception as error:
            raise EnvError(type(error).__name__, str(error)) from error

    @property
    def solution(self) -> list[str] | None:
        return self._object.solution() if hasattr(self._object, "solution") else None


class Instance:
    """What the prober uses of a sandbox instance."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.closed, self.steps = False, 0

    async def reset(self, seed: int) -> StepResult:
        await anyio.lowlevel.checkpoint()
        return StepResult(self._program.reset(seed), 0.0, False, False)

    async def step(self, action: str) -> StepResult:
        await anyio.lowlevel.checkpoint()
        self.steps += 1
        return self._program.step(action)

    async def close(self) -> None:
        self.closed = True


class Host:
    """A sandbox pool of one process; counts what was spawned."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.instances: list[Instance] = []
        self.fault = fault

    async def spawn(self, source: str, *, seed: int = 0, kwargs: dict[str, Any] | None = None) -> Instance:
        await anyio.lowlevel.checkpoint()
        if self.fault is not None:
            raise self.fault
        self.instances.append(Instance(Program(source, **(kwargs or {}))))
        return self.instances[-1]


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
        plausible = list(probes.plausible(first))
        refused = set[str]()
        for action in plausible:
            program.reset(seed)
            if episode(program, first, iter([action])).error:
                refused.add(action)
        valid = [action for action in plausible if action not in refused]
        players = {
            "sweep": probes.sweep(valid, turns),
            "random": probes.guess(valid, turns, seed),
            "constant": probes.constant(valid, turns, valid[len(valid) // 2]),
            "garbage banana": iter(["banana"]),
        }
        program.reset(seed)
        if program.solution is not None:
            players["solution"] = iter(program.solution)
        for policy, actions in players.items():
            first = program.reset(seed)
            episodes.append(Episode(policy, seed, episode(program, first, actions)))
    declared = dict(_FIELD.findall(source.partition("import")[0]))
    return Verdict(
        ok=True,
        rung="accepted",
        first_observations=tuple(firsts[:3]),
        metadata=Metadata(**declared) if declared else None,
        episodes=tuple(episodes),
    )
