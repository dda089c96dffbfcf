"""One lever moves the thing, its neighbours hum: find the cause by intervention (Causal Inference)."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from engine.nano.seeds.base import Parameters, Script, SizedFamily, boxed, numbers, stubborn, within


class Levers(SizedFamily):
    """Three tries cover nine levers at best; the hint names the three that matter."""

    name = "levers"
    skill = "Causal Inference"
    size = "top"
    slots = ("top", "tries", "base", "end")
    bands: ClassVar[Mapping[int, tuple[int, ...]]] = {
        1: (5, 6),
        2: (7, 8, 9),
        3: (10, 11, 12),
        4: (13, 14),
        5: (16, 18),
        6: (21, 24),
    }
    reserved = frozenset({6, 9, 11})
    documents = (
        "One lever among many moves the {noun}. The levers beside it hum when they are pulled.",
        "What makes the {noun} move is one lever of a long row. "
        "Pull and listen: a cause makes its neighbours hum.",
    )
    template = """
import random
class Env:
 def reset(self,seed):
  self.t=0;self.k=random.Random(seed).randint(A,B)
  return f"The $noun have levers 0..{N}, {T} tries"
 def step(self,a):
  self.t+=1;d=abs(int(a)-self.k);w=d==0
  return "yes" if w else f"{a} hums" if d<2 else f"{a} is dead",float(w),w or self.t>=T,False,{}
N=$top;T=$tries;A=$base;B=$end
"""

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        top = self.pick(level, rng, withheld=withheld)
        base = rng.randint(0, top - 2)
        return {"base": base, "end": base + 2, "top": top, "tries": 3}

    def level(self, parameters: Parameters) -> int:
        return min(6, max(1, self.band(int(parameters["top"])) + 3 - self.tries(parameters)))

    def fill(self, parameters: Parameters) -> Parameters:
        return within(parameters)

    def hint(self, parameters: Parameters) -> str:
        return f"{parameters['base']}..{parameters['end']}"

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        top = numbers(observation)[1]
        pulled = numbers(hint)[0] + 1 if hint else 1
        thought = str(hint) if hint else "try"
        humming: int | None = None
        while True:
            observation = yield boxed(thought, pulled)
            if humming is not None:
                thought, pulled = f"beside {humming}", humming - 1
            elif observation.endswith("hums"):
                humming = pulled
                thought, pulled = f"beside {humming}", humming + 1 if humming < top else humming - 1
            else:
                thought, pulled = "dead, on", min(pulled + 3, top)

    def blurt(self, observation: str, rng: Random) -> Script:
        top = numbers(observation)[1]
        return stubborn(lambda: rng.randint(0, top), rng)
