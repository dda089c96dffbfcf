"""A straight walk by compass, told in turns relative to where one faces (Spatial Reasoning)."""

from __future__ import annotations

import itertools
from random import Random

from engine.nano.seeds.base import LEVELS, Family, Parameters, Script, boxed, stubborn

_COMPASS = "nesw"
_TURNS = ("ahead", "right", "back", "left")


class Walk(Family):
    """A wall names the open direction; a thinking player converts it into a turn relative to its own facing.

    A naive player turns at every step, which leads to the end of a short walk only. The first observation
    does not have the direction, the hint has it. Of each length one direction is withheld.
    """

    name = "walk"
    skill = "Spatial Reasoning"
    slots = ("steps", "way")
    seed_levels = (1, 3, 4, 5, 6)
    held_levels = seed_levels
    documents = (
        "A straight path leads to the {noun}, but nobody says which way. Walls stop the one who errs.",
        "The {noun} lie a few steps away in the fog. Only one direction is open, and turns are all one has.",
    )
    template = """
import random
class Env:
 def reset(self,seed):
  self.t=self.n=0;self.d=random.Random(seed).choice("nesw")
  return f"The $noun lie {N} steps off, you face {self.d}, {T} tries"
 def step(self,a):
  g=a=="ahead right back left".split()["nesw".index(D)-"nesw".index(self.d)]
  self.t+=1;self.n+=g;w=self.n>=N
  return "yes" if w else "step" if g else "wall, go "+D,float(w),w or self.t>=T,False,{}
N=$steps;T=min(N+3,6);D="$way"
"""

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        steps = max(1, level - 1)
        kept = _kept(steps)
        return {"steps": steps, "way": kept if withheld else rng.choice(_COMPASS.replace(kept, ""))}

    def level(self, parameters: Parameters) -> int:
        steps = int(parameters["steps"])
        return 1 if steps < 2 else min(steps + 1, LEVELS[-1])

    def withheld(self, parameters: Parameters) -> bool:
        return parameters["way"] == _kept(int(parameters["steps"]))

    def hint(self, parameters: Parameters) -> str:
        return f"go {parameters['way']}"

    def fill(self, parameters: Parameters) -> Parameters:
        if str(parameters["way"]) not in tuple(_COMPASS):
            raise ValueError("a way is one of four")
        return parameters

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        start = _COMPASS.index(observation.split("face ")[1][0])
        thought, turn, told = "try", 0, hint
        while True:
            if told:
                # The compass is gone round from where one faces until the way that was told comes up.
                turn = (_COMPASS.index(told[-1]) - start) % 4
                thought = " ".join(f"{_COMPASS[(start + i) % 4]} {_TURNS[i]}" for i in range(turn + 1))
            observation = yield boxed(thought, _TURNS[turn])
            thought, told = "again", None if observation == "step" else observation

    def naive(self, observation: str, rng: Random) -> Script:
        """Turn at every step."""
        for turn in itertools.cycle(_TURNS):
            yield boxed("next", turn)

    def blurt(self, observation: str, rng: Random) -> Script:
        return stubborn(lambda: rng.choice(_TURNS), rng)


def _kept(steps: int) -> str:
    """Return the direction that is withheld in walks of this length."""
    return _COMPASS[steps % len(_COMPASS)]
