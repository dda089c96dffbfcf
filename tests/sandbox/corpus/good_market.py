# rung: accepted
import math
import random


class MarketEnv:
    """Buy low, sell high: the price follows a wave of unknown length."""

    def __init__(self, max_turns=15):
        self.max_turns = max_turns

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.period = rng.randint(4, 9)
        self.phase = rng.random() * 6.28
        self.day, self.cash, self.units = 0, 100.0, 0
        return f"Day 0, price {self._price():.2f}, cash 100. Double it in {self.max_turns} days: buy, sell or wait.", {}

    def _price(self):
        return 20 + 9 * math.sin(self.phase + 2 * math.pi * self.day / self.period)

    def step(self, action):
        word = str(action).strip().lower()
        price = self._price()
        note = ""
        if word == "buy":
            n = int(self.cash // price)
            self.units += n
            self.cash -= n * price
        elif word == "sell":
            self.cash += self.units * price
            self.units = 0
        elif word != "wait":
            note = "Say buy, sell or wait. "
        self.day += 1
        worth = self.cash + self.units * self._price()
        if worth >= 200 and self.units == 0:
            return f"You own {worth:.0f}.", 1.0, True, False, {"worth": worth}
        text = f"{note}Day {self.day}, price {self._price():.2f}, cash {self.cash:.2f}, units {self.units}."
        return text, 0.0, False, self.day >= self.max_turns, {"worth": worth}
