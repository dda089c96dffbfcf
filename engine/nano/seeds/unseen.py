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
    template = Guess.template.replace("0..{N}", "{L}..{N}").replace("N=$top", "L=$low;N=$top")

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        low = rng.choice(_LOWEST)
        drawn = super().draw(level, rng, withheld=withheld)
        return {
            "low": low,
            "tries": drawn["tries"],
            **{at: int(drawn[at]) + low for at in ("base", "end", "top")},
        }

    def level(self, parameters: Parameters) -> int:
        return super().level({**parameters, "top": int(parameters["top"]) - int(parameters["low"])})

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
        return {"words": " ".join(words), "least": level + 1, "most": level + 2, "tries": 2}

    def withheld(self, parameters: Parameters) -> bool:
        return True

    def fill(self, parameters: Parameters) -> Parameters:
        return parameters

    def blurt(self, observation: str, rng: Random) -> Script:
        while True:
            yield f"\\boxed{{{rng.choice(_NUMBERS)}}}"
