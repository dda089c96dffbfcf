"""Colours that come round again: name the next (Pattern Recognition)."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from engine.nano.seeds.base import Family, Parameters, Script, boxed, stubborn

PALETTE = ("red", "tan", "blue", "green", "gold", "pink", "gray", "black")

# The least share of runs that can be won, for levels 1-5.
_SHARES = (0.9, 0.7, 0.55, 0.45, 0.4)


class Cycle(Family):
    """A repeating list; often less than one cycle is shown, and the hint gives the whole cycle.

    Between ``least`` and ``most`` colours are shown. A run that will be as long as the period at the last
    try is enough for a win, and the level is by the share of such runs. Periods 4 and 7 are withheld.
    """

    name = "cycle"
    skill = "Pattern Recognition"
    slots = ("tries", "least", "most", "words")
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
T=$tries;A=$least;B=$most;C="$words"
"""
    seed_periods = (3, 5, 6)
    withheld_periods = (4, 7)

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        periods = self.withheld_periods if withheld else self.seed_periods
        fitting = [period for period in periods if period > level]
        if not fitting or (level > 3 and not withheld):
            raise ValueError(f"cycle has no {'withheld' if withheld else 'seed'} period at level {level}")
        period = rng.choice(fitting)
        words = rng.sample(PALETTE, period)
        return {"words": " ".join(words), "least": period - level, "most": period + 1, "tries": 2}

    def fill(self, parameters: Parameters) -> Parameters:
        words = str(parameters["words"]).split()
        if len(words) < 2 or len(set(words)) < len(words) or not set(words) <= set(PALETTE):
            raise ValueError("a cycle is of different colours")
        if not 1 <= int(parameters["least"]) <= int(parameters["most"]) <= 12:
            raise ValueError("a run has at least one colour and at most twelve")
        return parameters

    def level(self, parameters: Parameters) -> int:
        period = len(str(parameters["words"]).split())
        least, most = int(parameters["least"]), int(parameters["most"])
        enough = max(0, most - max(least, period + 1 - self.tries(parameters)) + 1)
        share = enough / (most - least + 1)
        return next((level for level, bound in enumerate(_SHARES, start=1) if share >= bound), 6)

    def withheld(self, parameters: Parameters) -> bool:
        return len(str(parameters["words"]).split()) not in self.seed_periods

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

    def blurt(self, observation: str, rng: Random) -> Script:
        return stubborn(lambda: rng.choice(PALETTE), rng)


def _successor(words: list[str], word: str) -> str | None:
    return next((after for before, after in pairwise(words) if before == word), None)
