# rung: accepted
import random


class DeepWellEnv:
    """Nothing in the text says how deep the well may be."""

    def __init__(self, max_turns=25):
        self.max_turns = max_turns

    def reset(self, seed=None):
        self.depth = random.Random(seed).randint(20000, 900000)
        self.turn = 0
        return "How much rope does the well need? Name a length.", {}

    def step(self, action):
        self.turn += 1
        cut = self.turn >= self.max_turns
        text = str(action).strip()
        if not text.isdigit():
            return "That is no length.", 0.0, False, cut, {}
        if int(text) == self.depth:
            return "The rope just touches the water.", 1.0, True, False, {}
        return ("It dangles." if int(text) < self.depth else "It coils up."), 0.0, False, cut, {}
