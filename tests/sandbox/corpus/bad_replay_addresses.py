# rung: replay
# reason: seed
import random


class Token:
    pass


class BagEnv:
    """The order of a set of plain objects is that of their addresses."""

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.names = {Token(): rng.choice("abc") + str(i) for i in range(12)}
        return f"Draw tokens, bag {seed}.", {}

    def step(self, action):
        first = next(iter(set(self.names)))
        return f"You draw {self.names[first]} ({id(first) % 9973}).", 0.0, False, False, {}
