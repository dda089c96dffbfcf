# rung: step
# reason: CPU time
import random


class CollatzEnv:
    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1, 9)
        return f"Name a number with a walk of {self.x} steps", {}

    def step(self, action):
        n = int(action) if action.lstrip("-").isdigit() else 0
        steps = 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
        return f"{steps}", float(steps == self.x), True, False, {}
