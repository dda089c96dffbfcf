# rung: accepted
# degenerate: no
import random


class LeverRoomEnv:
    """Only levers 5 and 6 are ever wired; one who knows wins half of the rooms at once."""

    def reset(self, seed=None):
        self.turn = 0
        self.lever = random.Random(seed).choice([5, 6])
        return "A row of levers 0..8. Three pulls."

    def step(self, action):
        self.turn += 1
        won = int(action) == self.lever
        return ("It opens." if won else "Nothing."), float(won), won or self.turn >= 3, False, {}
