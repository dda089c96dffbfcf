# rung: load
# reason: ends in Env
import random


class TreasureGame:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 9)
        return "Guess 1-9", {}

    def step(self, action):
        return "no", float(action == str(self.x)), True, False, {}
