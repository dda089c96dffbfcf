# rung: load
# reason: AttributeError
import random


class CountdownEnv:
    """Reads max_turns before anybody has set it."""

    def __init__(self, limit=12, **kwargs):
        self.turns_left = self.max_turns
        self.limit = limit

    def reset(self, seed=None):
        self.x = random.Random(seed).randint(0, 9)
        return "Count", {}

    def step(self, action):
        return "no", 0.0, False, False, {}
