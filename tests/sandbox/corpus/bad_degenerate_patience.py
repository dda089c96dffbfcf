# rung: accepted
# degenerate: yes
import random


class PatienceEnv:
    """Pays at the fifth turn, whatever was played."""

    def __init__(self, max_turns=12):
        self.max_turns = max_turns

    def reset(self, seed=None):
        self.x, self.turn = random.Random(seed).randint(1, 99), 0
        return f"Patient {self.x} wants to talk. Convince them.", {}

    def step(self, action):
        self.turn += 1
        if self.turn >= 5:
            return "They are convinced.", 1.0, True, False, {}
        return "They hesitate.", 0.0, False, False, {}
