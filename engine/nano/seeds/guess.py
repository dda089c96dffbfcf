"""A hidden number, found by halving what is left (Logical Deduction)."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from engine.nano.seeds.base import Script, SizedFamily, boxed, numbers


class Guess(SizedFamily):
    """Halving always ends within the tries; the hint says where to halve."""

    name = "guess"
    skill = "Logical Deduction"
    tops: ClassVar[Mapping[int, tuple[int, ...]]] = {
        1: (1, 2),
        2: (3, 4, 5, 6),
        3: (7, 8, 9, 10),
        4: (12, 13, 14, 16, 18, 20, 21),
        5: (23, 24, 25, 26, 27, 28),
        6: (30, 31),
    }
    reserved = frozenset({1, 5, 9, 13, 20, 25, 28, 31})
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
N=$top;T=N.bit_length()+1;A=$base;B=$end
"""

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        low, high = numbers(hint or observation)[:2]
        while True:
            middle = (low + high) // 2
            observation = yield boxed(f"{low}..{high}", middle)
            low, high = (middle + 1, high) if observation.startswith("over") else (low, middle - 1)
