"""A hidden number, found by halving what is left (Logical Deduction)."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from engine.nano.seeds.base import Parameters, Script, SizedFamily, boxed, numbers, stubborn, within


class Guess(SizedFamily):
    """Three tries halve up to seven places; beyond that only the hint makes a win sure."""

    name = "guess"
    skill = "Logical Deduction"
    size = "top"
    slots = ("top", "tries", "base", "end")
    bands: ClassVar[Mapping[int, tuple[int, ...]]] = {
        1: (5, 6),
        2: (7, 8, 9),
        3: (10, 11, 12),
        4: (13, 14, 15),
        5: (17, 19, 21),
        6: (24, 26, 28),
    }
    reserved = frozenset({6, 8, 11})
    documents = (
        "The {noun} hide behind one number of a row. Each wrong guess rules out one side of it.",
        "Somewhere along the line the {noun} are kept. Being told over or under, "
        "a clear head halves the rest.",
    )
    template = """
import random
class Env:
 def reset(self,seed):
  self.t=0;self.s=random.Random(seed).randint(A,B)
  return f"The $noun hide in 0..{N}, {T} tries"
 def step(self,a):
  self.t+=1;a=int(a);w=a==self.s
  return "yes" if w else f"{'over' if a<self.s else 'under'} {a}",float(w),w or self.t>=T,False,{}
N=$top;T=$tries;A=$base;B=$end
"""

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        top = self.pick(level, rng, withheld=withheld)
        width = rng.choice((2, 3))
        base = rng.randint(0, top - width)
        return {"base": base, "end": base + width, "top": top, "tries": 3}

    def level(self, parameters: Parameters) -> int:
        return min(6, max(1, self.band(int(parameters["top"])) + 3 - self.tries(parameters)))

    def fill(self, parameters: Parameters) -> Parameters:
        return within(parameters)

    def hint(self, parameters: Parameters) -> str:
        return f"{parameters['base']}..{parameters['end']}"

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        low, high = numbers(hint or observation)[:2]
        while True:
            middle = (low + high) // 2
            observation = yield boxed(f"{low}..{high}", middle)
            low, high = (middle + 1, high) if observation.startswith("over") else (low, middle - 1)

    def blurt(self, observation: str, rng: Random) -> Script:
        top = numbers(observation)[1]
        return stubborn(lambda: rng.randint(0, top), rng)
