# rung: variation
# reason: every seed
import random


class RiddleEnv:
    """Seeds a generator and never draws from it."""

    def reset(self, seed=None):
        self.rng = random.Random(seed)
        self.turn = 0
        return "What has roots that nobody sees? One word, three tries.", {}

    def step(self, action):
        self.turn += 1
        won = action.strip().lower() == "mountain"
        return ("Yes." if won else "No."), float(won), won, self.turn >= 3, {}
