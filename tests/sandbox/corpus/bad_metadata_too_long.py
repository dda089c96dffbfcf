# rung: metadata
# reason: at most 25 are played
METADATA = {"title": "The long way", "max_turns": 80}
import random


class LongEnv:
    def __init__(self, max_turns=80):
        self.max_turns = max_turns

    def reset(self, seed=None):
        self.x, self.turn = random.Random(seed).randint(0, 30), 0
        return "A number in 0..30", {}

    def step(self, action):
        self.turn += 1
        won = str(action) == str(self.x)
        return "yes" if won else "no", float(won), won, self.turn >= self.max_turns, {}
