# rung: step
# reason: terminated must be True or False, not int
import random


class NumericFlagsEnv:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 9)
        return f"Guess a number from 1 to 9 ({seed})", {}

    def step(self, action):
        done = 1 if action == str(self.x) else 0
        return "no", float(done), done, 0, {}
