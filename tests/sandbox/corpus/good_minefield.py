# rung: accepted
import random


class MinefieldEnv:
    """Cross a row of pairs of tiles; one of each pair is mined, and a sum over both rows is told."""

    def __init__(self, max_turns=12):
        self.max_turns = max_turns

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.mines = [rng.randint(0, 1) for _ in range(6)]
        self.place = 0
        self.turn = 0
        return (
            "Six pairs of tiles lie before you; in each pair one tile, left or right, is mined. "
            f"Mined on the left: {self.mines.count(0)}. Say 'probe' (at most three times) or 'left' or 'right'."
        ), {}

    def step(self, action):
        self.turn += 1
        word = str(action).strip().lower()
        cut = self.turn >= self.max_turns
        if word == "probe" and self.turn <= 6:
            side = "left" if self.mines[self.place] == 0 else "right"
            return f"The {side} tile ticks.", 0.0, False, cut, {}
        if word not in ("left", "right"):
            return "Say probe, left or right.", 0.0, False, cut, {}
        if (word == "right") == bool(self.mines[self.place]):
            return "Boom.", 0.0, True, False, {}
        self.place += 1
        if self.place == 6:
            return "You are across.", 1.0, True, False, {}
        return f"Pair {self.place + 1} of 6.", 0.0, False, cut, {}
