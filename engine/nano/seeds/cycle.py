"""Colours that come round again: name the next (Pattern Recognition)."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from engine.nano.seeds.base import LEVELS, Family, Parameters, Script, boxed, stubborn

PALETTE = ("red", "tan", "blue", "green", "gold", "pink", "gray", "black")

# Cycles that begin with one of these are withheld.
_WITHHELD = frozenset({"gray", "black"})


class Cycle(Family):
    """A repeating list that shows one period, so a player knows the next colour after at most one wrong try.

    A naive player says the colour before the last, which is right for two colours. The level is by the
    period. The hint gives the whole cycle.
    """

    name = "cycle"
    skill = "Pattern Recognition"
    slots = ("least", "most", "words")
    documents = (
        "The {noun} are painted in turn, and the colours come round again. A keen eye knows what follows.",
        "Colours of the {noun} repeat in one fixed order. The start of it is seen, the rest is inferred.",
    )
    template = """
import random
class Env:
 def reset(self,seed):
  r=random.Random(seed);self.t=0;self.c=(C.split()*9)[r.randint(0,9):];self.n=r.randint(A,B)
  return f"The $noun run {' '.join(self.c[:self.n])} ?, {T} tries"
 def step(self,a):
  s=self.c[self.n+self.t];self.t+=1;w=a==s
  return "yes" if w else f"no, {s} ?",float(w),w or self.t>=T,False,{}
T=2;A=$least;B=$most;C="$words"
"""

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        first = rng.choice([word for word in PALETTE if (word in _WITHHELD) is withheld])
        words = [first, *rng.sample([word for word in PALETTE if word != first], level)]
        return {"words": " ".join(words), "least": level + 1, "most": level + 2}

    def fill(self, parameters: Parameters) -> Parameters:
        words = str(parameters["words"]).split()
        if len(words) < 2 or len(set(words)) < len(words) or not set(words) <= set(PALETTE):
            raise ValueError("a cycle is of different colours")
        if not 1 <= int(parameters["least"]) <= int(parameters["most"]) <= 12:
            raise ValueError("a run has at least one colour and at most twelve")
        return parameters

    def level(self, parameters: Parameters) -> int:
        return min(LEVELS[-1], len(str(parameters["words"]).split()) - 1)

    def withheld(self, parameters: Parameters) -> bool:
        return str(parameters["words"]).split()[0] in _WITHHELD

    def hint(self, parameters: Parameters) -> str:
        words = str(parameters["words"])
        return f"{words} {words.split()[0]}"

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        shown = observation.split(" run ")[1].split(" ?")[0].split()
        known = hint.split() if hint else []
        while True:
            after = _successor(known, shown[-1]) or _successor(shown, shown[-1])
            thought = f"after {shown[-1]} {after}" if after else f"after {shown[-1]} new, first"
            observation = yield boxed(thought, after or shown[0])
            shown = [*shown, observation.removeprefix("no, ").split()[0]]

    def naive(self, observation: str, rng: Random) -> Script:
        """Say the colour before the last."""
        shown = observation.split(" run ")[1].split(" ?")[0].split()
        while True:
            observation = yield boxed("next", shown[-2])
            shown.append(observation.removeprefix("no, ").split()[0])

    def blurt(self, observation: str, rng: Random) -> Script:
        return stubborn(lambda: rng.choice(PALETTE), rng)


def _successor(words: list[str], word: str) -> str | None:
    return next((after for before, after in pairwise(words) if before == word), None)
