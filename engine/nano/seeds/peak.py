"""The best mark of a ring, found by how far off one was (Optimization)."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from engine.nano.seeds.base import Script, SizedFamily, boxed, count, numbers


class Peak(SizedFamily):
    """A distance on a ring leaves two marks, so three tries settle it; the hint tells where to look."""

    name = "peak"
    skill = "Optimization"
    tops: ClassVar[Mapping[int, tuple[int, ...]]] = {
        1: (1, 2),
        2: (3, 4),
        3: (5, 6),
        4: (7, 8, 9, 10),
        5: (11, 12, 13, 14),
        6: (15, 16, 17, 18, 20),
    }
    reserved = frozenset({1, 3, 6, 8, 12, 16, 18})
    documents = (
        "The {noun} do best at one mark of a dial. A trial tells how far off it was, not on which side.",
        "Set the dial well and the {noun} thrive. Each setting is judged by its distance from the best.",
    )
    template = """
import random
class Env:
 def reset(self,seed):
  self.t=0;self.s=random.Random(seed).randint(A,B)
  return f"The $noun peak on a ring 0..{N}, {T} tries"
 def step(self,a):
  self.t+=1;d=(int(a)-self.s)%(N+1);d=min(d,N+1-d);w=d==0
  return "yes" if w else f"off by {d}",float(w),w or self.t>=T,False,{}
N=$top;T=3;A=$base;B=$end
"""

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        top = numbers(observation)[1]
        base = numbers(hint)[0] if hint else 0
        observation = yield boxed(str(hint) if hint else "from 0", base)
        off = numbers(observation)[-1]
        if hint:
            up = count([(i, base + i) for i in range(1, off + 1)])
            observation = yield boxed(up, base + off)
        else:
            observation = yield boxed(f"off {off}", off)
        down = count([(i, top + 1 - i) for i in range(1, off + 1)])
        while True:
            observation = yield boxed(down, (top + 1 - off) % (top + 1))
