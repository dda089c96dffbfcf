# rung: turns
# reason: goes on after turn 6
"""
title: Six tries
max_turns: 6
"""
import random


class SixEnv:
    """Declares six turns and counts none of them."""

    def reset(self, seed=None):
        self.x = random.Random(seed).randint(1000, 9000)
        return "A number of four digits", {}

    def step(self, action):
        won = str(action) == str(self.x)
        return ("yes" if won else f"no, the last digit is {self.x % 10}"), float(won), won, False, {}
