# rung: accepted
"""
title: Three keys
skill: Causal Inference
idea: which key fits shows only after the lamp was lit
win: the chest is open
difficulty: medium
turns: 12
"""
import random


class KeysEnv:
    def __init__(self, max_turns=12, **kwargs):
        self.max_turns = max_turns

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.keys = rng.sample(["iron", "brass", "bone", "glass", "jade"], 4)
        self.right = rng.choice(self.keys)
        self.sign = {key: rng.choice(["a star", "a moon", "a fish"]) for key in self.keys}
        self.sign[self.right] = "a crown"
        self.lit = False
        self.turn = 0
        self.tried = 0
        return (
            f"A dark room, a chest, keys of {', '.join(self.keys)}. Two wrong keys jam the lock. "
            "Say: light, look KEY, or use KEY."
        ), {}

    def step(self, action):
        self.turn += 1
        verb, _, key = str(action).strip().lower().partition(" ")
        text = "You can: light, look KEY, use KEY."
        if verb == "light":
            self.lit = True
            text = "The lamp burns. A crown is carved on the chest."
        elif verb == "look" and key in self.keys:
            text = f"The {key} key bears {self.sign[key]}." if self.lit else "It is too dark."
        elif verb == "use" and key in self.keys:
            if key == self.right:
                return "The chest opens.", 1.0, True, False, {}
            self.tried += 1
            if self.tried >= 2:
                return "The lock jams.", 0.0, True, False, {}
            text = f"The {key} key does not turn."
        return text, 0.0, False, self.turn >= self.max_turns, {}

    def solution(self):
        return ["light", f"use {self.right}"]
