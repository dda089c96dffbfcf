# rung: accepted
# degenerate: yes
import random


class AgreeEnv:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(10, 99)
        return f"Is {self.x} larger than 3? Say yes or no.", {}

    def step(self, action):
        won = action.strip().lower() == "yes"
        return ("Right." if won else "Wrong."), float(won), True, False, {}
