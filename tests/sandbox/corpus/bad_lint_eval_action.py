# rung: lint
# reason: eval
import random


class FormulaEnv:
    """Evaluates what the player writes."""

    def reset(self, seed=None):
        self.goal = random.Random(seed).randint(20, 60)
        return f"Write a formula with the digits 1 to 9 that gives {self.goal}.", {}

    def step(self, action):
        try:
            value = eval(action)
        except Exception:
            return "That is no formula.", 0.0, False, True, {}
        return f"It gives {value}.", float(value == self.goal), True, False, {}
