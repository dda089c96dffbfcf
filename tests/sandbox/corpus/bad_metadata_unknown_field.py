# rung: metadata
# reason: tags
METADATA = {"goal": "Find the number", "tags": ["search"]}


class PuzzleEnv:
    def reset(self, seed=None):
        self.x, self.turn = random.Random(seed).randint(0, 30), 0
        return "A number in 0..30", {}

    def step(self, action):
        self.turn += 1
        won = str(action) == str(self.x)
        return "yes" if won else "no", float(won), won, self.turn >= 5, {}
