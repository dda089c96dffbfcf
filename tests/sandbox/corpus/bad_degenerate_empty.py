# rung: accepted
# degenerate: yes
import random


class SilenceEnv:
    """Pays for saying nothing."""

    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 99)
        return f"Room {self.x}. Who keeps silent longest?", {}

    def step(self, action):
        won = not action.strip()
        return ("Well kept." if won else "You spoke."), float(won), True, False, {}
