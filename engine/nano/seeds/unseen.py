"""Two families that no warm start shows: the skills of others, on what those never contain."""

from __future__ import annotations

from random import Random

from engine.nano.seeds.base import Parameters, Script, within
from engine.nano.seeds.cycle import Cycle
from engine.nano.seeds.guess import Guess

_LOWEST = (3, 6, 9, 12)
_NUMBERS = ("2", "5", "7", "12", "16", "21", "28", "30")


class Shelf(Guess):
    """A hidden number of a range that does not begin at 0."""

    name = "shelf"
    slots = ("low", *Guess.slots)
    template = Guess.template.replace("0..{N}", "{L}..{N}").replace("N=$top;T=N", "L=$low;N=$top;T=(N-L)")

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        low = rng.choice(_LOWEST)
        drawn = super().draw(level, rng, withheld=withheld)
        return {"low": low, **{at: int(drawn[at]) + low for at in ("base", "end", "top")}}

    def places(self, parameters: Parameters) -> int:
        return super().places(parameters) - int(parameters["low"])

    def withheld(self, parameters: Parameters) -> bool:
        return True

    def fill(self, parameters: Parameters) -> Parameters:
        if int(parameters["low"]) > int(parameters["base"]):
            raise ValueError("what is hidden lies outside of what is shown")
        return within(parameters)


class Rota(Cycle):
    """Numbers that come round again."""

    name = "rota"

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        words = rng.sample(_NUMBERS, level + 1)
        return {"words": " ".join(words), "least": level + 1, "most": level + 2}

    def withheld(self, parameters: Parameters) -> bool:
        return True

    def fill(self, parameters: Parameters) -> Parameters:
        return parameters

    def blurt(self, observation: str, rng: Random) -> Script:
        while True:
            yield f"\\boxed{{{rng.choice(_NUMBERS)}}}"
