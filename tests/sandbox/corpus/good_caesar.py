# rung: accepted
import random
import string


class CaesarEnv:
    """Undo a shift cipher; every wrong try tells how far the first letter is off."""

    WORDS = "lantern harbour village thunder compass blanket".split()

    def __init__(self, max_turns=5):
        self.max_turns = max_turns

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.word, shift = rng.choice(self.WORDS), rng.randint(3, 20)
        letters = string.ascii_lowercase
        table = str.maketrans(letters, letters[shift:] + letters[:shift])
        self.turn = 0
        return f"Every letter was moved on by the same number: {self.word.translate(table)}. Undo it.", {}

    def step(self, action):
        self.turn += 1
        guess = str(action).strip().lower()
        if guess == self.word:
            return "Deciphered.", 1.0, True, False, {}
        off = ord(guess[0]) - ord(self.word[0]) if guess else None
        return f"No. First letter off by {off}.", 0.0, False, self.turn >= self.max_turns, {}
