# rung: reset
# reason: random
import random


class ShadowEnv:
    """The import is shadowed by an attribute that does not exist."""

    def reset(self, seed=None):
        self.rng = self.random.Random(seed)
        return "Guess", {}

    def step(self, action):
        return "no", 0.0, True, False, {}
