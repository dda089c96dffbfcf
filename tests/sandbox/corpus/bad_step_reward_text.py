# rung: step
# reason: reward must be a number, not str
import random


class WordyRewardEnv:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 9)
        return f"Guess a number from 1 to 9 ({seed})", {}

    def step(self, action):
        return "no", "1.0" if action == str(self.x) else "0.0", True, False, {}
