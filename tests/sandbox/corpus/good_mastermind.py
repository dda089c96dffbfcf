# rung: accepted
"""Three pegs of four colours are hidden; every guess tells how many are in place."""
import random


class MastermindEnv:
    COLOURS = "RGBY"

    def __init__(self, max_turns=10, **kwargs):
        self.max_turns = max_turns
        self.turn = 0
        self.code = ""

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.code = "".join(rng.choice(self.COLOURS) for _ in range(3))
        self.turn = 0
        observation = (
            f"A code of three letters from {self.COLOURS} is hidden. You have {self.max_turns} turns.\n"
            "Write a guess such as \\boxed{RGB}."
        )
        return observation, {}

    def step(self, action):
        self.turn += 1
        guess = str(action).strip().upper()
        if len(guess) != 3 or any(c not in self.COLOURS for c in guess):
            over = self.turn >= self.max_turns
            return f"A guess has three letters from {self.COLOURS}.", 0.0, False, over, {}
        if guess == self.code:
            return "That is the code.", 1.0, True, False, {"turn": self.turn}
        right = sum(a == b for a, b in zip(guess, self.code))
        there = sum(min(guess.count(c), self.code.count(c)) for c in self.COLOURS)
        text = f"{right} in place, {there - right} elsewhere."
        return text, 0.0, False, self.turn >= self.max_turns, {"turn": self.turn}
