# rung: accepted
# degenerate: yes
import random


class ForkEnv:
    """A guess between two ways is a coin, however it is told."""

    def reset(self, seed=None):
        self.way = random.Random(seed).choice(["left", "right"])
        return "The path forks: left or right? You cannot come back.", {}

    def step(self, action):
        if action not in ("left", "right"):
            return "Go left or right.", 0.0, False, False, {}
        return "You arrive.", float(action == self.way), True, False, {}
