# rung: accepted
import random

WORDS = ("orange", "castle", "market", "forest", "pencil", "mirror", "rocket", "summer")


class AnagramEnv:
    def __init__(self, max_turns=6):
        self.max_turns = max_turns

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.word = rng.choice(WORDS)
        letters = list(self.word)
        while "".join(letters) == self.word:
            rng.shuffle(letters)
        self.turn = 0
        return f"Which English word is scrambled here: {'-'.join(letters)}?", {"length": len(self.word)}

    def step(self, action):
        self.turn += 1
        guess = str(action).strip().lower()
        if guess == self.word:
            return "Right.", 1.0, True, False, {}
        same = sum(a == b for a, b in zip(guess, self.word))
        return f"No; {same} letters stand where they should.", 0.0, False, self.turn >= self.max_turns, {}

    def solution(self):
        return self.word
