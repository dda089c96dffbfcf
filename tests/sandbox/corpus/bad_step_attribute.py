# rung: step
# reason: AttributeError
import random


class ForgotEnv:
    """The history is only made when the first move is right."""

    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 9)
        return f"Guess a number from 1 to 9 ({seed})", {}

    def step(self, action):
        if action == str(self.x):
            self.history = [action]
        self.history.append(action)
        return "no", 0.0, False, False, {}
