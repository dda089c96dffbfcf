# rung: metadata
# reason: difficulty
import random


class PuzzleEnv:
    METADATA = {"goal": "Find the number", "skill": "Search", "difficulty": "very hard", "max_turns": 5}

    def reset(self, seed=None):
        self.x, self.turn = random.Random(seed).randint(0, 30), 0
        return "A number in 0..30", {}

    def step(self, action):
        self.turn += 1
        won = str(action) == str(self.x)
        return "yes" if won else "no", float(won), won, self.turn >= 5, {}
