# rung: accepted
import random


class NumberHuntEnv:
    """Find a number by halving; the first observation is always the same."""

    def __init__(self, max_turns=10):
        self.max_turns = max_turns

    def reset(self, seed=None):
        self.secret = random.Random(seed).randint(1, 1000)
        self.turn = 0
        return "I think of a number between 1 and 1000. You have ten guesses.", {}

    def step(self, action):
        self.turn += 1
        try:
            guess = int(action)
        except ValueError:
            return "Please send a whole number.", 0.0, False, self.turn >= self.max_turns, {}
        if guess == self.secret:
            return "Correct!", 1.0, True, False, {}
        hint = "Too low." if guess < self.secret else "Too high."
        return hint, 0.0, False, self.turn >= self.max_turns, {}
