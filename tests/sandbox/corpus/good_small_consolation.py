# rung: accepted
# degenerate: no
import random


class ArithmeticEnv:
    """A hundredth for any well-formed answer is no reason for alarm."""

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.a, self.b = rng.randint(100, 999), rng.randint(100, 999)
        return f"What is {self.a} times {self.b}?", {}

    def step(self, action):
        right = action.strip() == str(self.a * self.b)
        return ("Right." if right else "Wrong."), 1.0 if right else 0.01, True, False, {}

    def solution(self):
        return str(self.a * self.b)
