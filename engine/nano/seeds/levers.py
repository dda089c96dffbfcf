"""One lever moves the thing, its neighbours hum or tick: find the cause (Causal Inference)."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from engine.nano.seeds.base import Script, SizedFamily, boxed, numbers


class Levers(SizedFamily):
    """Each pull tells of three levers, so every third is enough; the hint names the three that matter."""

    name = "levers"
    skill = "Causal Inference"
    widths = (2,)
    seed_levels = (1, 2, 3, 4)
    held_levels = (2, 3, 4)
    tops: ClassVar[Mapping[int, tuple[int, ...]]] = {
        1: (1,),
        2: (2, 3, 4, 6),
        3: (5, 7, 8, 9, 10, 12, 13),
        4: (11, 14),
    }
    reserved = frozenset({4, 6, 8, 11, 12})
    documents = (
        "One lever among many moves the {noun}. The one before it hums, the one after it ticks.",
        "What makes the {noun} move is one lever of a long row. "
        "Pull and listen: the lever before it hums, the lever after it ticks.",
    )
    template = """
import random
class Env:
 def reset(self,seed):
  self.t=0;self.k=random.Random(seed).randint(A,B)
  return f"The $noun have levers 0..{N}, {T} tries"
 def step(self,a):
  self.t+=1;d=self.k-int(a);w=d==0
  s="yes" if w else a+{1:" hums",-1:" ticks"}.get(d," is dead")
  return s,float(w),w or self.t>=T,False,{}
N=$top;T=N//3+2;A=$base;B=$end
"""

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        top = numbers(observation)[1]
        pulled = numbers(hint)[0] + 1 if hint else 1
        thought = str(hint) if hint else "try"
        while True:
            observation = yield boxed(thought, pulled)
            if observation.endswith("hums"):
                thought, pulled = f"after {pulled}", pulled + 1
            elif observation.endswith("ticks"):
                thought, pulled = f"before {pulled}", pulled - 1
            else:
                thought, pulled = "dead, on", min(pulled + 3, top)
