# rung: accepted
# degenerate: yes
import random


class ApplauseEnv:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 99)
        return f"Performance {self.x}: do something.", {}

    def step(self, action):
        return "Bravo!", 1.0, True, False, {}
