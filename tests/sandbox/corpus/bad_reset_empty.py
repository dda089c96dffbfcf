# rung: reset
# reason: empty
import random


class SilentEnv:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 9)
        return "", {}

    def step(self, action):
        return "no", float(action == str(self.x)), True, False, {}
