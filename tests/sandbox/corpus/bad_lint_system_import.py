# rung: lint
# reason: os.getenv
import random
from os import getenv


class LevelEnv:
    def reset(self, seed=None):
        self.top = int(getenv("LEVEL", "9"))
        self.goal = random.Random(seed).randint(0, self.top)
        return f"Guess a number from 0 to {self.top}.", {}

    def step(self, action):
        return "ok", float(action == str(self.goal)), True, False, {}
