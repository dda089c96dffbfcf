# rung: lint
# reason: import of requests
import requests
import random


class WeatherEnv:
    def reset(self, seed=None):
        self.city = random.Random(seed).choice(["Rome", "Oslo"])
        return f"How warm is {self.city}?", {}

    def step(self, action):
        warm = requests.get(f"https://example.org/{self.city}").text
        return "ok", float(action == warm), True, False, {}
