# rung: parse
# reason: IndentationError
import random


class MazeEnv:
    def reset(self, seed=None):
        rng = random.Random(seed)
          self.at = 0
        return "walk", {}
