# rung: accepted
import random

WORDS = ["planet", "garden", "window", "bridge", "silver", "copper", "anchor", "pirate"]


class HangmanEnv:
    def __init__(self, max_turns=14, lives=6):
        self.max_turns = max_turns
        self.lives_at_start = lives

    def reset(self, seed=None):
        self.word = random.Random(seed).choice(WORDS)
        self.known = set()
        self.lives = self.lives_at_start
        self.turn = 0
        return f"Guess a six-letter word, letter by letter: {self._mask()}. {self.lives} misses are allowed.", {}

    def _mask(self):
        return " ".join(c if c in self.known else "_" for c in self.word)

    def step(self, action):
        self.turn += 1
        letter = str(action).strip().lower()
        cut = self.turn >= self.max_turns
        if len(letter) != 1 or not letter.isalpha():
            return f"One letter, please. {self._mask()}", 0.0, False, cut, {}
        if letter in self.word:
            self.known.add(letter)
            if set(self.word) <= self.known:
                return f"The word is {self.word}.", 1.0, True, False, {}
            return f"Yes: {self._mask()}", 0.0, False, cut, {}
        self.lives -= 1
        if self.lives <= 0:
            return "No misses left.", 0.0, True, False, {}
        return f"No {letter}. {self._mask()}, {self.lives} misses left.", 0.0, False, cut, {}
