# rung: reset
# reason: ZeroDivisionError
import random


class RatioEnv:
    def reset(self, seed=None):
        rng = random.Random(seed)
        self.a, self.b = rng.randint(1, 9), seed % 2
        self.ratio = self.a / self.b
        return f"What is {self.a} / {self.b}?", {}

    def step(self, action):
        return "no", float(action == str(self.ratio)), True, False, {}
