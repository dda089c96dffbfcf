# rung: lint
# reason: own source
import random

HERE = __file__


class QuineEnv:
    def reset(self, seed=None):
        self.place = random.Random(seed).randrange(len(HERE))
        return f"Which letter is number {self.place} of the file's name?", {}

    def step(self, action):
        return "ok", float(action == HERE[self.place]), True, False, {}
