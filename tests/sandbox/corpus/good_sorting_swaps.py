# rung: accepted
from dataclasses import dataclass, field
from enum import Enum
import random


class Phase(Enum):
    PLAYING = "playing"
    OVER = "over"


@dataclass
class Shelf:
    books: list = field(default_factory=list)

    def sorted(self):
        return self.books == sorted(self.books)


class SortingEnv:
    """Sort a shelf by swapping two places in few moves."""

    METADATA = {
        "version": 1,
        "title": "Shelf",
        "goal": "All books in order",
        "skill": "Optimization",
        "difficulty": 0.5,
        "max_turns": 8,
    }

    def __init__(self, max_turns: int = 8):
        self.max_turns = max_turns
        self.shelf = Shelf()
        self.phase = Phase.OVER

    def reset(self, seed=None):
        rng = random.Random(seed)
        books = rng.sample(range(10, 99), 6)
        while books == sorted(books):
            rng.shuffle(books)
        self.shelf = Shelf(books)
        self.phase = Phase.PLAYING
        self.turn = 0
        return f"Sort the shelf in {self.max_turns} swaps, such as '0 3': {books}", {"phase": self.phase.value}

    def step(self, action: str):
        self.turn += 1
        parts = str(action).split()
        cut = self.turn >= self.max_turns
        if len(parts) != 2 or not all(p.isdigit() and int(p) < 6 for p in parts):
            return "Two places from 0 to 5, please.", 0.0, False, cut, {}
        i, j = map(int, parts)
        books = self.shelf.books
        books[i], books[j] = books[j], books[i]
        if self.shelf.sorted():
            self.phase = Phase.OVER
            return "Sorted.", 1.0, True, False, {"phase": self.phase.value}
        return f"Now {books}", 0.0, False, cut, {"phase": self.phase.value}

    def solution(self):
        books, moves = list(self.shelf.books), []
        for i in range(len(books)):
            j = books.index(min(books[i:]), i)
            if i != j:
                books[i], books[j] = books[j], books[i]
                moves.append(f"{i} {j}")
        return moves
