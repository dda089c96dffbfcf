"""A straight walk in a hidden direction, told in turns relative to where one faces (Spatial Reasoning)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from random import Random
from typing import ClassVar

from engine.nano.seeds.base import LEVELS, MAX_TURNS, Family, Parameters, Script, boxed, stubborn

_COMPASS = "nesw"
_WITHHELD = "w"
_TURNS = ("ahead", "right", "back", "left")


class Walk(Family):
    """Three spare tries (``tries - steps``) are enough for whoever keeps the direction once it is found.

    A naive player turns at every step, which leads to the end of a short walk only. The direction is in no
    observation, only in the hint. Walks to the west are withheld.
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
        1: ((1, 4),),
        2: ((2, 6),),
        3: ((2, 5),),
        4: ((3, 6),),
        5: ((3, 5),),
        6: ((4, 6),),
    }

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        steps, tries = rng.choice(self.courses[level])
        way = _WITHHELD if withheld else rng.choice(_COMPASS.replace(_WITHHELD, ""))
        return {"steps": steps, "tries": tries, "way": way}

    def level(self, parameters: Parameters) -> int:
        tight = self.tries(parameters) < MAX_TURNS
        return {1: 1, 2: 2 + tight, 3: 4 + tight}.get(int(parameters["steps"]), LEVELS[-1])

    def withheld(self, parameters: Parameters) -> bool:
        return parameters["way"] == _WITHHELD

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

    def naive(self, observation: str, rng: Random) -> Script:
        """Turn at every step."""
        for turn in itertools.cycle(_TURNS):
            yield boxed("next", turn)

    def blurt(self, observation: str, rng: Random) -> Script:
        return stubborn(lambda: rng.choice(_TURNS), rng)
