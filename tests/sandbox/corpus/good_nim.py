# rung: accepted
import random


class NimEnv:
    """Take 1-3 stones; whoever takes the last one wins. The opponent plays perfectly when it can."""

    def __init__(self, max_turns=20):
        self.max_turns = max_turns

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.stones = rng.choice([n for n in range(13, 24) if n % 4])
        self.turn = 0
        return f"There are {self.stones} stones. Take 1, 2 or 3; the last stone wins. You begin.", {}

    def step(self, action):
        self.turn += 1
        try:
            take = int(str(action).strip())
        except ValueError:
            return "Take 1, 2 or 3.", 0.0, False, self.turn >= self.max_turns, {}
        if take not in (1, 2, 3) or take > self.stones:
            return "Take 1, 2 or 3, no more than there are.", 0.0, False, self.turn >= self.max_turns, {}
        self.stones -= take
        if self.stones == 0:
            return "You took the last stone.", 1.0, True, False, {}
        reply = self.stones % 4 or 1
        self.stones -= reply
        if self.stones == 0:
            return f"I take {reply}, the last ones.", 0.0, True, False, {}
        return f"I take {reply}; {self.stones} are left.", 0.0, False, self.turn >= self.max_turns, {}
