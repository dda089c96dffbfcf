# rung: metadata
# reason: version 3
METADATA = {"version": 3, "goal": "Find the number", "reward": "plenty"}


class PuzzleEnv:
    def reset(self, seed=None):
        self.x, self.turn = random.Random(seed).randint(0, 30), 0
        return "A number in 0..30", {}

    def step(self, action):
        self.turn += 1
        won = str(action) == str(self.x)
        return "yes" if won else "no", float(won), won, self.turn >= 5, {}
