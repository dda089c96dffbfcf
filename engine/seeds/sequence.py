"""A number grows by the same hidden step: say the next one (Mathematical Reasoning)."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from engine.seeds.base import Parameters, Script, SizedFamily, boxed, count, numbers, stubborn


class Sequence(SizedFamily):
    """The step is in no first observation: it shows only after a wrong try, or in the hint."""

    name = "sequence"
    skill = "Mathematical Reasoning"
    size = "step"
    slots = ("high", "step", "tries")
    bands: ClassVar[Mapping[int, tuple[int, ...]]] = {
        1: (1, 2, 3),
        2: (4, 5, 6),
        3: (7, 8, 9),
        4: (10, 11),
        5: (12, 13),
        6: (14, 15),
    }
    reserved = frozenset({2, 5, 8})
    documents = (
        "Every day the {noun} grow in number by the same amount. "
        "Who knows today's count can tell tomorrow's.",
        "The {noun} are laid in rows, each longer than the last by one fixed step. The next row can be told.",
    )
    template = """
import random
class Env:
 def reset(self,seed):
  self.t=0;self.x=random.Random(seed).randint(2,$high)
  return f"The $noun go {self.x} ?, $tries tries"
 def step(self,a):
  self.t+=1;self.x+=$step;w=int(a)==self.x
  return "yes" if w else f"no, {self.x} ?",float(w),w or self.t>=$tries,False,{}
"""

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        return {
            "high": rng.randint(12, 30),
            "step": self.pick(level, rng, withheld=withheld),
            "tries": 2,
        }

    def level(self, parameters: Parameters) -> int:
        return min(6, max(1, self.band(int(parameters["step"])) + 2 - self.tries(parameters)))

    def hint(self, parameters: Parameters) -> str:
        return f"add {parameters['step']}"

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        now = numbers(observation)[0]
        step = numbers(hint)[0] if hint else 0
        while True:
            if hint:
                thought = count([(i, now + i) for i in range(1, step + 1)])
                observation = yield boxed(thought, now + step)
            elif not step:
                observation = yield boxed("guess", now + rng.randint(1, 9))
            else:
                # Both terms are counted up together until the older one reaches the newer one.
                thought = count([(now - step + i, now + i) for i in range(1, step + 1)])
                observation = yield boxed(thought, now + step)
            before, now = now, numbers(observation)[0]
            step = now - before

    def blurt(self, observation: str, rng: Random) -> Script:
        now = numbers(observation)[0]
        return stubborn(lambda: now + rng.randint(1, 12), rng)
