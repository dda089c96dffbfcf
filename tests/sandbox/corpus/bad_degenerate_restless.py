# rung: accepted
# degenerate: yes
import random


class RestlessEnv:
    """Pays whoever does two different things."""

    def reset(self, seed=None):
        self.seen = set()
        self.x = random.Random(seed).randint(1, 9)
        return f"Day {self.x}: surprise me, 0..9.", {}

    def step(self, action):
        self.seen.add(action)
        won = len(self.seen) > 1
        return ("Nice." if won else "Go on."), float(won), won, len(self.seen) > 5, {}
