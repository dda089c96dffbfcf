# rung: turns
# reason: max_turns is 10
import random


class ElevenEnv:
    """Off by one: > where >= is meant."""

    def __init__(self):
        self.max_turns = 10

    def reset(self, seed=None):
        self.x, self.turn = random.Random(seed).randint(1000, 9000), 0
        return "A number of four digits", {}

    def step(self, action):
        self.turn += 1
        won = str(action) == str(self.x)
        over = self.turn > self.max_turns
        return ("yes" if won else f"no, the last digit is {self.x % 10}"), float(won), won, over, {}
