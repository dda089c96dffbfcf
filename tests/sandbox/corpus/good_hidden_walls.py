# rung: accepted
import random


class HiddenWallsEnv:
    """Walk a 4 x 4 grid whose walls are felt only by bumping into them."""

    MOVES = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}

    def __init__(self, max_turns=20, **kwargs):
        self.max_turns = max_turns
        self.size = 4

    def reset(self, seed=None):
        rng = random.Random(seed)
        cells = [(x, y) for x in range(self.size) for y in range(self.size)]
        self.goal = rng.choice(cells[4:])
        free = [c for c in cells if c not in ((0, 0), self.goal)]
        self.walls = set(rng.sample(free, 3))
        self.at = (0, 0)
        self.turn = 0
        return (
            f"You stand at (0, 0) of a {self.size} by {self.size} grid. The lamp is at {self.goal}. "
            f"Move north, south, west or east. {self.max_turns} turns."
        ), {}

    def step(self, action):
        self.turn += 1
        cut = self.turn >= self.max_turns
        move = self.MOVES.get(str(action).strip().lower())
        if move is None:
            return "Moves are north, south, west, east.", 0.0, False, cut, {}
        there = (self.at[0] + move[0], self.at[1] + move[1])
        if not all(0 <= v < self.size for v in there) or there in self.walls:
            return f"A wall. You are still at {self.at}.", 0.0, False, cut, {}
        self.at = there
        if self.at == self.goal:
            return "You reach the lamp.", 1.0, True, False, {}
        return f"You are at {self.at}.", 0.0, False, cut, {}

    def solution(self):
        frontier = [((0, 0), [])]
        seen = {(0, 0)}
        while frontier:
            at, path = frontier.pop(0)
            if at == self.goal:
                return path
            for name, (dx, dy) in self.MOVES.items():
                there = (at[0] + dx, at[1] + dy)
                inside = all(0 <= v < self.size for v in there)
                if inside and there not in self.walls and there not in seen:
                    seen.add(there)
                    frontier.append((there, path + [name]))
        return ["north"]
