# rung: lint
# reason: pathlib's read_text
import random
from pathlib import Path


class WordEnv:
    def reset(self, seed=None):
        words = Path("/usr/share/dict/words").read_text().split()
        self.word = random.Random(seed).choice(words)
        return "Guess the word: " + "".join(sorted(self.word)), {}

    def step(self, action):
        return "ok", float(action == self.word), True, False, {}
