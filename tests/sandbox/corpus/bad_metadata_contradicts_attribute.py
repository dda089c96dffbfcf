# rung: metadata
# reason: declares 6 turns, but its max_turns is 9
METADATA = {"title": "Nine tries", "max_turns": 6}
import random


class NineEnv:
    def __init__(self):
        self.max_turns = 9

    def reset(self, seed=None):
        self.x, self.turn = random.Random(seed).randint(0, 30), 0
        return "A number in 0..30", {}

    def step(self, action):
        self.turn += 1
        won = str(action) == str(self.x)
        return "yes" if won else "no", float(won), won, self.turn >= self.max_turns, {}
