# rung: leak
# reason: word after
import random


class BadgeEnv:
    """The badge number is printed in the question; copying it wins."""

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.badge = rng.randint(3, 60)
        self.turn = 0
        return f"Visitor with badge {self.badge} stands at gate {rng.randint(1, 4)}. Which number lets you in?", {}

    def step(self, action):
        self.turn += 1
        won = action.strip() == str(self.badge)
        return ("Welcome." if won else "No."), float(won), won, self.turn >= 3, {}
