# rung: step
# reason: 5 values, not 4
import random


class OldGymEnv:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 9)
        return f"Guess a number from 1 to 9 ({seed})"

    def step(self, action):
        done = action == str(self.x)
        return "no", float(done), done, {}
