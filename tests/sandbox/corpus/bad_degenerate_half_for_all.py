# rung: accepted
# degenerate: yes
import random


class ConsolationEnv:
    """Pays nearly half for anything: just where the designer's own reward is best."""

    def reset(self, seed=None):
        self.secret = random.Random(seed).getrandbits(40)
        return f"Name the number. Its last digit is {self.secret % 10}.", {}

    def step(self, action):
        won = action.strip() == str(self.secret)
        return ("Right." if won else "Nearly."), 1.0 if won else 0.45, True, False, {}
