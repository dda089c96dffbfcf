# rung: reset
# reason: must return text
import random


class StateEnv:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 9)
        return {"observation": "Guess 1-9", "turn": 0}

    def step(self, action):
        return "no", float(action == str(self.x)), True, False, {}
