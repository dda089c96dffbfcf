# rung: accepted
# degenerate: yes
import random


class WheelEnv:
    """A seeded coin, whatever is played."""

    def reset(self, seed=None):
        self.rng = random.Random(seed)
        self.number = self.rng.randint(1, 36)
        return f"The wheel last showed {self.number}. Place a bet.", {}

    def step(self, action):
        won = self.rng.random() < 0.5
        return ("It pays." if won else "It does not."), float(won), True, False, {}
