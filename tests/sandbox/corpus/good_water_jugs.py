# rung: accepted
import random
from collections import deque


class WaterJugsEnv:
    """Measure an amount with two jugs."""

    CASES = [(3, 5, 4), (4, 7, 5), (3, 8, 7), (5, 7, 6), (4, 9, 6)]

    def __init__(self, max_turns=16):
        self.max_turns = max_turns

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.a, self.b, self.goal = rng.choice(self.CASES)
        self.state = (0, 0)
        self.turn = 0
        return (
            f"Jug A holds {self.a}, jug B holds {self.b} litres. Have exactly {self.goal} litres in one of them. "
            "Moves: fill A, fill B, empty A, empty B, pour A, pour B."
        ), {}

    def _after(self, state, move):
        x, y = state
        if move == "fill a":
            return self.a, y
        if move == "fill b":
            return x, self.b
        if move == "empty a":
            return 0, y
        if move == "empty b":
            return x, 0
        if move == "pour a":
            moved = min(x, self.b - y)
            return x - moved, y + moved
        if move == "pour b":
            moved = min(y, self.a - x)
            return x + moved, y - moved
        return None

    def step(self, action):
        self.turn += 1
        after = self._after(self.state, str(action).strip().lower())
        cut = self.turn >= self.max_turns
        if after is None:
            return "There is no such move.", 0.0, False, cut, {}
        self.state = after
        if self.goal in after:
            return f"A holds {after[0]}, B holds {after[1]}: done.", 1.0, True, False, {}
        return f"A holds {after[0]}, B holds {after[1]}.", 0.0, False, cut, {}

    def solution(self):
        queue = deque([((0, 0), [])])
        seen = {(0, 0)}
        moves = ["fill a", "fill b", "empty a", "empty b", "pour a", "pour b"]
        while queue:
            state, path = queue.popleft()
            if self.goal in state:
                return path
            for move in moves:
                after = self._after(state, move)
                if after not in seen:
                    seen.add(after)
                    queue.append((after, path + [move]))
        return []
