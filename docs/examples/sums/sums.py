"""A suite of one's own: sums of two numbers, in two sizes."""

import random
from typing import ClassVar

from engine.config import SamplingConfig
from engine.evals.suite import Item, Outcome, Preset, Suite, spread


class Sums(Suite):
    """``sums:SIZES``, such as ``sums:small,large``."""

    version = "sums 1"
    presets: ClassVar = {"smoke": Preset(sampling=SamplingConfig(temperature=0.6, max_tokens=64), items=8)}

    def __init__(self, sizes):
        self.sizes = sizes

    def items(self, count, seed):
        rng = random.Random(seed)
        found = []
        for number in range(50):
            for size in self.sizes:
                most = {"small": 9, "large": 999}[size]
                pair = rng.randint(1, most), rng.randint(1, most)
                text = f"How much is {pair[0]} and {pair[1]}?"
                found.append(Item(name=f"{size}/{number}", group=size, text=text, data=sum(pair)))
        return spread(found, count)

    async def play(self, item, seat):
        reply = await seat.ask([f"{item.text} Put the number into \\boxed{{}}."])
        return Outcome(score=float(reply.boxed == str(item.data)), detail={"right": item.data})

    def guess(self, item, messages, rng):
        return f"\\boxed{{{rng.randint(2, 18)}}}"


def sums(argument, config):
    """Return the suite for the argument of its source."""
    return Sums(argument.split(",") if argument else ["small", "large"])
