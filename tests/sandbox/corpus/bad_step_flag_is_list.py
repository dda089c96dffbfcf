# rung: step
# reason: truncated must be True or False, not list
import random


class LazyFlagsEnv:
    """`a and b` of lists is a list, not a boolean."""

    def reset(self, seed=None):
        self.left = [1, 2, 3]
        self.x = random.Random(seed).randint(1, 9)
        return f"Guess a number from 1 to 9 ({seed})", {}

    def step(self, action):
        self.left.pop() if self.left else None
        return "no", 0.0, False, self.left and [], {}
