"""A hidden number, found by halving what is left (Logical Deduction)."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from engine.nano.seeds.base import Script, SizedFamily, boxed, numbers, stubborn


class Guess(SizedFamily):
    """Halving finds one of 7, 15 or 31 places in three, four or five tries; the hint says where to halve."""

    name = "guess"
    skill = "Logical Deduction"
    courses: ClassVar[Mapping[int, tuple[tuple[int, int], ...]]] = {
        1: ((3, 2), (4, 3)),
        2: ((3, 3), (3, 4), (4, 5), (4, 6)),
        3: ((3, 5), (3, 6), (4, 7), (4, 8)),
        4: ((4, 9), (4, 10), (4, 11), (4, 12), (4, 13), (4, 14)),
        5: ((5, 19), (5, 20), (5, 21), (5, 22), (5, 24)),
        6: ((5, 25), (5, 26), (5, 27), (5, 28), (5, 29), (5, 30)),
    }
    reserved = frozenset({3, 7, 11, 13, 20, 22, 27, 29})
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

    def reach(self, tries: int) -> float:
        return float(2**tries - 1)

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        low, high = numbers(hint or observation)[:2]
        while True:
            middle = (low + high) // 2
            observation = yield boxed(f"{low}..{high}", middle)
            low, high = (middle + 1, high) if observation.startswith("over") else (low, middle - 1)

    def blurt(self, observation: str, rng: Random) -> Script:
        top = numbers(observation)[1]
        return stubborn(lambda: rng.randint(0, top), rng)
