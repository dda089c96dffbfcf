# rung: lint
# reason: eval()
import random


class SumEnv:
    """The answer may be written as a sum."""

    def reset(self, seed=None):
        self.goal = random.Random(seed).randint(20, 60)
        return f"Write a sum that gives {self.goal}, such as 3+4.", {}

    def step(self, action, eval=eval):
        try:
            value = eval(action)
        except Exception:
            return "That is no sum.", 0.0, False, True, {}
        return f"It gives {value}.", float(value == self.goal), True, False, {}
