"""A straight walk in a hidden direction, told in turns relative to where one faces (Spatial Reasoning)."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from engine.nano.seeds.base import Family, Parameters, Script, boxed, stubborn

_COMPASS = "nesw"
_TURNS = ("ahead", "right", "back", "left")


class Walk(Family):
    """Each wrong turn costs a try, so the spare tries (``tries - steps``) make the level.

    Walks of 3 and 5 steps are withheld. The direction is in no observation, only in the hint.
    """

    name = "walk"
    skill = "Spatial Reasoning"
    slots = ("steps", "tries", "way")
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
  return "yes" if w else "step" if g else "wall",float(w),w or self.t>=T,False,{}
N=$steps;T=$tries;D="$way"
"""
    courses: ClassVar[Mapping[int, tuple[tuple[int, int], ...]]] = {
        1: ((2, 5), (3, 6)),
        2: ((2, 4), (4, 6), (3, 5)),
        3: ((2, 3), (4, 5), (3, 4)),
        4: ((5, 6),),
        5: ((3, 3),),
        6: ((5, 5),),
    }

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        fitting = [
            {"steps": steps, "tries": tries}
            for steps, tries in self.courses[level]
            if self.withheld({"steps": steps}) is withheld
        ]
        if not fitting:
            raise ValueError(f"walk has no {'withheld' if withheld else 'seed'} course at level {level}")
        return {**rng.choice(fitting), "way": rng.choice(_COMPASS)}

    def level(self, parameters: Parameters) -> int:
        steps = int(parameters["steps"])
        spare = self.tries(parameters) - steps
        if spare >= 2:
            return 1 if spare >= 3 else 2
        return (3 if steps < 5 else 4) if spare == 1 else (5 if steps < 5 else 6)

    def withheld(self, parameters: Parameters) -> bool:
        return int(parameters["steps"]) in (3, 5)

    def hint(self, parameters: Parameters) -> str:
        return f"go {parameters['way']}"

    def fill(self, parameters: Parameters) -> Parameters:
        if str(parameters["way"]) not in tuple(_COMPASS):
            raise ValueError("a way is one of four")
        return parameters

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        facing = observation.split("face ")[1][0]
        turn = 0
        thought = "try"
        if hint:
            turn = (_COMPASS.index(hint.split()[-1]) - _COMPASS.index(facing)) % 4
            # The compass is gone round from where one faces until the way of the hint comes up.
            start = _COMPASS.index(facing)
            thought = " ".join(f"{_COMPASS[(start + i) % 4]} {_TURNS[i]}" for i in range(turn + 1))
        while True:
            observation = yield boxed(thought, _TURNS[turn])
            thought = "again" if observation == "step" else "turn"
            turn = turn if observation == "step" else (turn + 1) % 4

    def blurt(self, observation: str, rng: Random) -> Script:
        return stubborn(lambda: rng.choice(_TURNS), rng)
