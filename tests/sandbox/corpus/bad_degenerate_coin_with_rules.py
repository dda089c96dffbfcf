# rung: accepted
# degenerate: yes
import random


class CoinEnv:
    """Only the two calls are valid, and neither has anything to do with the outcome."""

    def reset(self, seed=None):
        self.rng = random.Random(seed)
        self.turn = 0
        return "Call heads or tails.", {}

    def step(self, action):
        self.turn += 1
        if action not in ("heads", "tails"):
            return "That is no call.", 0.0, False, self.turn >= 3, {}
        won = self.rng.random() < 0.45
        return ("Your call." if won else "Not your call."), float(won), True, False, {}
