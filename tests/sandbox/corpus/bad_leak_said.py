# rung: leak
# reason: gives the answer away
import random


class OracleEnv:
    def reset(self, seed=None):
        self.word = random.Random(seed).choice(["amber", "coral", "slate", "ivory", "khaki"])
        self.turn = 0
        return f"Find the colour. (Debug: the answer is {self.word}.)", {}

    def step(self, action):
        self.turn += 1
        won = action.strip() == self.word
        return ("Yes." if won else "No."), float(won), won, self.turn >= 3, {}

    def solution(self):
        return self.word
