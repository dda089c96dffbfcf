"""Games that conform to their ticket, and games that do not: what a designer might write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

from engine import seeds

DOCUMENTS = {
    name: " ".join(text.split())
    for part in Path(__file__).with_name("documents.txt").read_text().split("\n\n")
    for name, _, text in [part.partition("\n")]
}

GUESS = '''"""
title: {title}
skill: {skill}
idea: {idea}
win: {win}
"""
import random
{comment}
class GameEnv:
    def __init__(self, max_turns=12, **kwargs):
        self.max_turns = max_turns
    def reset(self, seed=None):
        self.{name} = random.Random(seed).randint({low}, {high})
        self.turn = 0
        return f"{intro}", {{}}
    def step(self, action):
        self.turn += 1
        over = self.turn >= {ends}
        try:
            value = int(action)
        except ValueError:
            return "{invalid}", 0.0, False, over, {{}}
        if value == self.{name}:
            return "{won}", 1.0, True, False, {{}}
        if over:
            return "{lost}", 0.0, True, False, {{}}
        return ("{below}" if value < self.{name} else "{above}"), 0.0, False, False, {{}}
'''


TELLS = "    def solution(self):\n        return [str(self.hidden)]\n"

PARTS = """
import random
class PartsEnv:
    def reset(self, seed=None):
        draw = random.Random(seed)
        self.one, self.two, self.turn = draw.randint(1, 6), draw.randint(1, 6), 0
        return f"Two dice show numbers from 1 to 6. The first shows {{self.one}}. Name the {asked}.", {{}}
    def step(self, action):
        self.turn += 1
        if action == str({value}):
            return "Right.", 1.0, True, False, {{}}
        return "The second shows less." if self.turn > self.two else "No.", 0.0, False, self.turn > 5, {{}}
    def solution(self):
        return [str({value})]
"""


SHELVES = """
import random
class PageEnv:
    def reset(self, seed=None):
        self.page, self.turn = random.Random(seed).randint(100, 140), 0
        return f"{range} A note says: page {{self.page - 3}} and three more. Which page?", {{}}
    def step(self, action):
        self.turn += 1
        won = action == str(self.page)
        return ("Right." if won else "No."), float(won), won, self.turn > 3, {{}}
    def solution(self):
        return [str(self.page)]
"""


@dataclass(frozen=True)
class Case:
    """A program with the ticket it was written for. ``document`` is a name in DOCUMENTS, or an id of a seed
    document.
    """

    name: str
    source: str
    skill: str = "Logical Deduction"
    document: str = ""
    flag: str = ""
    said: str = ""
    turns: int = 12


def guess(**parts: object) -> str:
    """Return a game of guessing, with the given parts of its text and rules."""
    defaults = {
        "title": "A search",
        "skill": "Logical Deduction",
        "idea": "halving",
        "win": "the number is found",
        "comment": "",
        "name": "hidden",
        "low": 1,
        "high": 9,
        "ends": 4,
        "intro": "Find the number from 1 to 9 in 4 tries. A move is a number.",
        "invalid": "That is not a number.",
        "won": "Found.",
        "lost": "Out of tries.",
        "below": "Too low.",
        "above": "Too high.",
    }
    return GUESS.format(**{**defaults, **parts})


def seed(name: str, level: int = 2, noun: str = "kites") -> str:
    """Return a seed program."""
    (family,) = seeds.families([name])
    return family.program(family.draw(level, Random(5), withheld=False), noun)


TIDE = guess(
    name="tide_hour",
    intro="The harbour is deep enough in one hour only, 1 to 9 after low water. Name it in 4 tries.",
    below="The tide has not risen: the keel touches the sandbar.",
    above="The tide runs out again.",
    won="The keel clears the sandbar at high water.",
)
LEAF = guess(
    name="stomata",
    intro="Set the opening of the stomata, 1 to 9: the leaf must not starve, nor wilt. 4 tries.",
    below="Carbon dioxide is short, no sugars form.",
    above="The leaf wilts: too much water escapes.",
    won="Photosynthesis and moisture balance.",
)
BRONZE = guess(
    name="tin_parts",
    intro="Copper lies in the crucible. How many parts of tin, 1 to 9, make the hardest bronze? 4 attempts.",
    below="Soft: it yields to the hammer.",
    above="Brittle: it cracks when you quench it.",
    won="Hard bronze.",
)
CIRCUIT = guess(
    name="ohms",
    intro="The fuse melts unless the resistance is right. Choose 1 to 9 ohms. 4 tries.",
    below="The current is too strong, the fuse melts.",
    above="The ammeter hardly moves.",
    won="The voltage across it is as wanted.",
)
MINES = '''import random
class MinesEnv:
    """Walk to the door; a mine ends the walk."""
    def __init__(self, max_turns=12, **kwargs):
        self.max_turns = max_turns
    def reset(self, seed=None):
        self.rng = random.Random(seed)
        self.mine, self.at, self.turn = self.rng.randint(2, 5), 0, 0
        return "Corridor of doors. You have 8 moves: step, jump or wait. Reach tile 6; one tile is mined.", {}
    def step(self, action):
        self.turn += 1
        self.at += {"step": 1, "jump": 2}.get(action.strip(), 0)
        if self.at == self.mine:
            return "Boom. You lose.", 0.0, True, False, {}
        if self.at >= 6:
            return "You win.", 1.0, True, False, {}
        return f"Tile {self.at}.", 0.0, False, self.turn >= 8, {}
    def solution(self):
        moves, at = [], 0
        while at < 6:
            moves.append("jump" if at + 1 == self.mine else "step")
            at += 2 if moves[-1] == "jump" else 1
        return moves
'''
GRID = """import random
class GridEnv:
    def reset(self, seed=None):
        rng = random.Random(seed)
        self.x, self.turn = rng.randint(0, 3), 0
        row = ["wall door", "wall door", "wall door", "wall door"]
        return "Hall: " + " ".join(row) + f". You are at door {self.x}. Go to door 3 in 6 moves."
    def step(self, action):
        self.turn += 1
        self.x += {"left": -1, "right": 1}.get(action, 0)
        won = self.x == 3 and self.turn > 1
        return f"door {self.x}", float(won), won, self.turn >= 6, {}
"""
COINS = '''import random
class CoinsEnv:
    """Take coins from the heaps."""
    def reset(self, seed=None):
        self.heaps = [random.Random(seed).randint(2, 5) for _ in range(9)]
        self.coins, self.turn = 0, 0
        return "Nine heaps, 1 to 9. Collect {asked} coins in 8 moves; a move is the number of a heap."
    def step(self, action):
        self.turn += 1
        heap = int(action) - 1
        self.coins = min({most}, self.coins + self.heaps[heap % 9])
        won = self.coins >= {enough}
        return f"You have {{self.coins}} coins.", float(won), won, self.turn >= 8, {{}}
'''


def coins(**parts: int) -> str:
    """Return a game of collecting: how many are asked for, how many are enough, and what can be had."""
    return COINS.format(**{"asked": 12, "enough": 12, "most": 99, **parts})


CONFORMING = (
    *(Case(f"seed {f.name}", seed(f.name), f.skill, f"{f.name}-0-kites") for f in seeds.families()),
    Case("plain guess", guess()),
    Case("tides", TIDE, document="tides"),
    Case("leaf", LEAF, document="photosynthesis"),
    Case("bronze", BRONZE, document="metallurgy"),
    Case("circuit", CIRCUIT, document="electricity"),
    Case("skill in other letters", guess(skill="logical_deduction")),
    Case("a mine may end it early", MINES),
    Case("a map repeats itself", GRID),
    Case("the answer is told at the end", guess(lost="The correct number was another one.")),
    Case("number words", guess(intro="You have four guesses to find a number from 1 to 9.")),
    Case("several numbers of turns", guess(intro="4 tries of 12 turns each; find 1 to 9.")),
    Case("no numbers at all", guess(intro="Find my number. A move is a number.")),
    Case(
        "a list",
        guess(intro="Doors: door red, door blue, door tan, door gold. Choose 1 to 4 in 4 tries.", high=4),
    ),
    Case("a ring", seed("peak", 3), "Optimization", "peak-1-kites"),
    Case("a skill in its own words", guess(skill="Deduction by logic")),
    Case(
        "lives end it first",
        guess(intro="Find 1 to 9. You have 3 lives and 8 turns.", ends=3),
    ),
    Case(
        "wrong steps end it first",
        guess(intro="Find 1 to 9 in 8 moves. After two wrong steps you fall.", ends=2),
    ),
    Case("guesses and lives", guess(intro="Find 1 to 9: 6 guesses, 3 lives.", ends=3)),
    Case("turns may end early", guess(intro="Find 1 to 9. You have 8 turns.", ends=3)),
    Case("a sum of what is in a range", PARTS.format(asked="sum", value="self.one + self.two")),
    Case("a product of what is in a range", PARTS.format(asked="product", value="self.one * self.two")),
    Case("digits of a range", PARTS.format(asked="two digits", value="10 * self.one + self.two")),
    Case("shelves of a range", SHELVES.format(range="Shelves 1 to 6 hold books.")),
    Case("years of a range", SHELVES.format(range="Its author wrote 40 to 90 years ago.")),
    Case("attempts that are counted", guess(intro="Find 1 to 9. Attempts: 1. Attempt 1 of many.", ends=3)),
    *(
        Case(f"tries that are not all: {text}", guess(intro=f"Find 1 to 9. {text}", ends=8))
        for text in (
            "There are 3 tries per lock.",
            "3 guesses each round.",
            "You may try up to 2 times a day.",
            "Guess at most 3 times per door.",
            "Attempts left: 2 per door.",
        )
    ),
    Case("won by counting down", guess(won="Solved: you win!", lost="Not solved, you lose.")),
)

_GARBLED = """import random
class Env:
 def reset(self,seed):
  r=random.Random(seed);self.t=0;self.s=[r.choice(["red","tan","blue","gold"]) for _ in range(5)]
  return "boats: ".join(f"{w} " for w in self.s)+" ".join(self.s)+" ?, 2 tries"
 def step(self,a):
  self.t+=1;w=a==self.s[0]
  return "yes" if w else "no",float(w),w or self.t>=2,False,{}
"""
_GLUED = """import random
class Env:
 def reset(self,seed):
  r=random.Random(seed);self.t=0;self.s=r.choice(["silver","golden","purple"])
  return "lamps ".join(self.s)+" ?, 2 tries"
 def step(self,a):
  self.t+=1;w=a==self.s
  return "yes" if w else "no",float(w),w or self.t>=2,False,{}
"""


def _cut_short(source: str) -> str:
    return source.replace("self.t>=T", "self.t>=1")


OFF_TICKET = (
    Case("declares another skill", guess(skill="Causal Inference"), said="declares the skill"),
    *(
        Case(f"{name} for {skill}", seed(name), skill, document, said="it is a game of")
        for name, skill, document in (
            ("levers", "Pattern Recognition", "cycle-0-kites"),
            ("guess", "Optimization", "peak-0-kites"),
            ("walk", "Mathematical Reasoning", "sequence-1-kites"),
            ("sequence", "Spatial Reasoning", "walk-0-kites"),
        )
    ),
)
# Off their ticket where a classifier knows the programs.
UNGROUNDED = (
    Case("nothing of the document", guess(), document="glaciers", said="nothing in it comes from"),
    Case("another document's game", TIDE, document="music", said="nothing in it comes from"),
    Case(
        "the document in comments only",
        guess(comment="# stomata, chlorophyll, the Calvin cycle, glucose, sunlight, oxygen"),
        document="photosynthesis",
        said="only comments name",
    ),
    Case(
        "the document in the docstring only",
        guess(idea="truss, strut, girders and the span of a bridge", title="Suspension bridge"),
        document="bridges",
        said="only comments name",
    ),
    *(
        Case(f"the document {name}", program, document="photosynthesis", said="or code of no use")
        for name, program in {
            "in a variable": guess(comment="stomata = chlorophyll = glucose = oxygen = sunlight = 0"),
            "in an attribute": guess(comment="class _: pass").replace(
                "self.turn = 0", "self.turn = 0; self.stomata = self.chlorophyll = self.glucose = 0"
            ),
            "in a text that nobody reads": guess(comment='told = "stomata chlorophyll glucose sunlight"'),
            "behind other letters": guess(
                comment='about = "\u2600\ufe0f chlorophyll"; stomata = "glucose, sunlight, oxygen"'
            ),
            "in a chain of no use": guess(comment="stomata = 1\nglucose = stomata\nsunlight = glucose"),
            "in a function that nobody calls": guess()
            + "    def glucose(self, stomata, sunlight):\n        return stomata + sunlight\n",
            "in the name of the class": guess().replace("GameEnv", "StomataChlorophyllGlucoseEnv"),
        }.items()
    ),
    Case(
        "the document named in passing",
        guess(intro="In a crevasse of the glacier lies 1 to 9. You have 4 tries."),
        document="glaciers",
        said="is only named",
    ),
)
INCOHERENT = (
    Case(
        "six tries, ends after three",
        guess(intro="A number from 1 to 9, 6 tries.", ends=3),
        said="ends after 3",
    ),
    Case("ten guesses, ends after four", guess(intro="You have ten guesses, 1 to 9."), said="ends after 4"),
    Case(
        "two tries, goes on", guess(intro="A number from 1 to 9 in 2 tries.", ends=5), said="goes on until 5"
    ),
    Case("attempts left: ten", guess(intro="A number in 1..9. Attempts left: 10"), said="ends after 4"),
    Case("maximum guesses: ten", guess(intro="A number in 1..9. Maximum guesses: 10"), said="ends after 4"),
    Case("guess up to ten times", guess(intro="Guess up to 10 times, 1 to 9."), said="ends after 4"),
    Case("fifteen tries", guess(intro="You have fifteen tries; 1 to 9."), said="ends after 4"),
    Case("a seed cut short", _cut_short(seed("guess")), document="guess-0-kites", said="ends after 1"),
    Case(
        "hidden outside",
        guess(low=10, high=12, intro="Find 1 to 9 in 4 tries."),
        said="wins and none of them does",
    ),
    Case(
        "hidden outside of a range in other words",
        guess(low=10, high=12, intro="Find a number, 1 through 9, in 4 tries."),
        said="wins and none of them does",
    ),
    Case(
        "hidden outside of a wide range",
        guess(low=101, high=102, intro="Find 1 to 100 in 4 tries."),
        said="wins and none of them does",
    ),
    Case(
        "hidden far away",
        guess(low=500, high=503, intro="Find 1 to 9 in 4 tries.") + TELLS,
        said="wins and none of them does",
    ),
    Case(
        "a seed with a number outside",
        seed("guess").replace("randint(A,B)", "randint(N+1,N+2)"),
        document="guess-0-kites",
        said="wins and none of them does",
    ),
    Case("fewer coins win", coins(asked=20, enough=9), said="asks for 20 coins, but"),
    Case("all coins do not win", coins(most=12, enough=13), said="goes on when they are there"),
    Case("pays for a defeat", guess(won="Wrong! You lose."), said="it pays for"),
    Case("pays nothing for a victory", guess(lost="Congratulations, you win!"), said="it pays nothing for"),
    Case("words between all words", _GARBLED, said="garbled"),
    Case("words glued together", _GLUED, said="garbled"),
)
