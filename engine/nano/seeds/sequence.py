"""A number grows by the same hidden step: say where it stands next (Mathematical Reasoning)."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from engine.nano.seeds.base import LEVELS, Family, Parameters, Script, boxed, count, numbers, stubborn


class Sequence(Family):
    """The step is in no first observation: it shows only after a wrong try, or in the hint.

    Steps are shown as the numbers passed, and thoughts count along them: a policy of this size tabulates
    additions otherwise. A naive player adds one. The step makes the level. Plays begin at one of three
    numbers from the start on; some starts are withheld, so held-out plays begin where no seed play begins.
    """

    name = "sequence"
    skill = "Mathematical Reasoning"
    slots = ("step", "start")
    steps: ClassVar[Mapping[int, tuple[int, ...]]] = {
        1: (1,),
        2: (2,),
        3: (3,),
        4: (4, 5),
        5: (6, 7),
        6: (8, 9),
    }
    seed_starts = (2, 5, 11, 14, 20, 23, 29, 32)
    withheld_starts = (8, 17, 26, 35)
    documents = (
        "Every day the {noun} grow in number by the same amount. "
        "Who knows today's count can tell tomorrow's.",
        "The {noun} are laid in rows, each longer than the last by one fixed step. The next row can be told.",
    )
    template = """
import random
class Env:
 def reset(self,seed):
  self.t=0;self.x=S+random.Random(seed).randint(0,2)
  return f"The $noun go {self.x}?, {T} tries"
 def step(self,a):
  s=" ".join(str(self.x+i+1) for i in range(K));self.t+=1;self.x+=K;w=int(a)==self.x
  return "yes" if w else f"no, {s}?",float(w),w or self.t>=T,False,{}
K=$step;T=2;S=$start
"""

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        starts = self.withheld_starts if withheld else self.seed_starts
        return {"step": rng.choice(self.steps[level]), "start": rng.choice(starts)}

    def fill(self, parameters: Parameters) -> Parameters:
        if int(parameters["step"]) < 1:
            raise ValueError("a sequence grows")
        return parameters

    def level(self, parameters: Parameters) -> int:
        step = int(parameters["step"])
        return next((level for level, steps in self.steps.items() if step <= max(steps)), LEVELS[-1])

    def withheld(self, parameters: Parameters) -> bool:
        return int(parameters["start"]) not in self.seed_starts

    def hint(self, parameters: Parameters) -> str:
        return f"add {parameters['step']}"

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        now = numbers(observation)[0]
        passed = list(range(1, numbers(hint)[0] + 1)) if hint else []
        while True:
            if passed:
                # Count on from where it stands, in step with the numbers passed, until they end.
                thought = count([(left, now + i) for i, left in enumerate(passed, start=1)])
                observation = yield boxed(thought, now + len(passed))
            else:
                observation = yield boxed("guess", now + rng.randint(1, 7))
            passed = numbers(observation)
            now = passed[-1]

    def naive(self, observation: str, rng: Random) -> Script:
        """Add one."""
        now = numbers(observation)[0]
        while True:
            observation = yield boxed("next", now + 1)
            now = numbers(observation)[-1]

    def blurt(self, observation: str, rng: Random) -> Script:
        now = numbers(observation)[0]
        return stubborn(lambda: now + rng.randint(1, 12), rng)
