# rung: accepted
# degenerate: yes
import random


class VaultEnv:
    """Only the code opens it, and nothing tells the code."""

    def __init__(self, max_turns=12):
        self.max_turns = max_turns

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.code = "".join(rng.choice("ABCDEFGHIJKLMNOP") for _ in range(6))
        self.turn = 0
        return "The vault has six wheels. Set all of them.", {}

    def step(self, action):
        self.turn += 1
        if str(action).strip() == self.code:
            return "The door swings open.", 1.0, True, False, {}
        return "Nothing moves.", 0.0, False, self.turn >= self.max_turns, {}

    def solution(self):
        return [self.code]
