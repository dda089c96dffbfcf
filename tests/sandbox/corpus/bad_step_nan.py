# rung: step
# reason: not finite
import math
import random


class EntropyEnv:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 9)
        return f"Guess a number from 1 to 9 ({seed})", {}

    def step(self, action):
        score = math.inf - math.inf if action != str(self.x) else 1.0
        return "no", score, False, False, {}
