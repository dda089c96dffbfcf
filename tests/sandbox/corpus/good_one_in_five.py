# rung: accepted
# degenerate: no
import random


class FiveDoorsEnv:
    """An honest guess: one try, five doors."""

    def reset(self, seed=None):
        self.door = random.Random(seed).randint(1, 5)
        return "A cat hides behind one of the doors 1-5. You may open one."

    def step(self, action):
        won = str(action).strip() == str(self.door)
        return ("There it is." if won else "Nothing."), float(won), True, False, {}
