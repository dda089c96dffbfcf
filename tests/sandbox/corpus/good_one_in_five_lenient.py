# rung: accepted
# degenerate: no
import random


class FiveCupsEnv:
    """Like five doors, but whatever is no number lifts the first cup."""

    def reset(self, seed=None):
        self.cup = random.Random(seed).randint(0, 4)
        return "A pea lies under one of the cups 0-4. Lift one."

    def step(self, action):
        text = str(action).strip()
        lifted = int(text) if text.isdigit() and int(text) < 5 else 0
        return ("A pea." if lifted == self.cup else "Empty."), float(lifted == self.cup), True, False, {}
