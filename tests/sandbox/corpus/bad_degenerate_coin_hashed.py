# rung: accepted
# degenerate: yes
import random


class HashEnv:
    """Each action has its own coin in each instance."""

    def reset(self, seed=None):
        self.seed = seed
        return "Choose a number in 0..20.", {}

    def step(self, action):
        won = random.Random(f"{self.seed}/{action}").random() < 0.5
        return ("Lucky." if won else "Unlucky."), float(won), True, False, {}
