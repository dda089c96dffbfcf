# rung: solution
# reason: AttributeError
import random


class ProductEnv:
    def reset(self, seed=None):
        rng = random.Random(seed)
        self.a, self.b = rng.randint(20, 60), rng.randint(20, 60)
        self.turn = 0
        return f"What is {self.a} times {self.b}? Two tries.", {}

    def step(self, action):
        self.turn += 1
        won = action.strip() == str(self.a * self.b)
        return ("Yes." if won else "No."), float(won), won, self.turn >= 2, {}

    def solution(self):
        return self.path[0]
