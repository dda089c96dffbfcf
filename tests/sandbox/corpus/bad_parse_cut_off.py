# rung: parse
# reason: SyntaxError
import random


class TreasureEnv:
    """The completion ended in the middle of a call."""

    def reset(self, seed=None):
        self.chests = [random.Random(seed).randint(1, 9
