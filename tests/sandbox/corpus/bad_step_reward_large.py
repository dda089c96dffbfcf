# rung: step
# reason: outside [-10, 10]
import random


class PointsEnv:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 9)
        return f"Guess a number from 1 to 9 ({seed})", {}

    def step(self, action):
        return "no", 100 if action == str(self.x) else -50, True, False, {}
