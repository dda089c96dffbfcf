# rung: step
# reason: every action
import random


class PickyEnv:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 9)
        return f"Guess a number from 1 to 9 ({seed})", {}

    def step(self, action):
        move = {"GUESS_ONE": 1, "GUESS_TWO": 2}[action]
        return "no", float(move == self.x), True, False, {}
