import random


class NumberEnv:
    """Find a number between 1 and 15 by asking; every answer says higher or lower."""

    max_turns = 6

    def reset(self, seed):
        self.secret = random.Random(seed).randint(1, 15)
        self.turns = 0
        return "I think of a number from 1 to 15. Guess it in at most 6 turns."

    def step(self, action):
        self.turns += 1
        try:
            guess = int(action)
        except ValueError:
            return "That is no number.", -1.0, True, False, {}
        if guess == self.secret:
            return "Right.", 1.0, True, False, {}
        word = "higher" if self.secret > guess else "lower"
        return f"It is {word} than {guess}.", 0.0, False, self.turns >= self.max_turns, {}

    def solution(self):
        return str(self.secret)
