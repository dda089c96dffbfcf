# rung: replay
# reason: first observation
import random


class VisitEnv:
    visits = 0

    def reset(self, seed=None):
        VisitEnv.visits += 1
        self.x = random.Random(seed).randint(1, 9)
        return f"Visit number {VisitEnv.visits}: guess 1-9.", {}

    def step(self, action):
        return "no", float(action == str(self.x)), True, False, {}
