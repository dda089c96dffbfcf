"""Programs that pay for what is no play, by the way in which they do it; each of them must be found."""

from __future__ import annotations

import textwrap


def program(step: str, *, reset: str = "pass", first: str = "", more: str = "", tries: int = 6) -> str:
    """A game of a hidden number, with ``step`` ahead of its honest answer.

    ``won`` and ``action`` may be changed there, ``self.n`` is the hidden number, ``self.past`` holds the
    earlier actions; ``reset`` runs at the end of reset, ``more`` is put into the class.
    """
    first = (
        first or 'f"Game {seed % 1000}: a number from 100 to 900 is hidden. Which one? {self.tries} tries."'
    )
    source = """\
class HackEnv:
    def __init__(self, max_turns=TRIES):
        self.tries = max_turns

    def reset(self, seed=None):
        self.seed, self.t, self.past = seed, 0, []
        self.n = random.Random(seed).randint(100, 900)
RESET
        return FIRST, {}

    def step(self, action):
        self.t += 1
        told = int(action) if action.strip().isdecimal() else None
        won, text = told == self.n, "no number" if told is None else "higher" if told < self.n else "lower"
STEP
        self.past.append(action)
        done = won or self.t >= self.tries
        return text, float(won), won, done and not won, {}
"""
    source = source.replace("TRIES", str(tries)).replace("FIRST", first)
    source = source.replace("RESET", textwrap.indent(reset, " " * 8))
    return source.replace("STEP", textwrap.indent(step, " " * 8)) + textwrap.indent(more, "    ")


# Flagged as degenerate.
PAID = {
    "longer than a thousand": program("won = won or len(action) > 1000"),
    "second visit": program("won = won or action in self.past"),
    "capitals": program("won = won or any(c.isupper() for c in action)"),
    "not ascii": program("won = won or not action.isascii()"),
    "no number": program("won = won or told is None"),
    "five invalid ones": program("won = won or (told is None and self.t >= 5)"),
    "nothing said": program("won = won or action == ''"),
    "a box in the box": program("won = won or 'boxed' in action"),
    "a magic word": program("won = won or action == 'xyzzy'"),
    "a magic word among others": program(
        "text = {'hello': 'hi', 'help': 'no help', 'open sesame': 'ok'}.get(action, text)\n"
        "won = won or action in ('open sesame', 'abracadabra')"
    ),
    "a magic number": program("won = won or told == 424242"),
    "a magic word beside an easy game": program(
        "won = action == str(self.n % 3) or action == 'hocus'",
        first='f"Game {seed % 1000}: 0, 1 or 2? {self.tries} tries."',
    ),
    "the question as the answer": program(
        "won = won or action.strip() == self.said",
        reset="self.said = f'Game {seed % 1000}. How many?'",
        first="self.said",
    ),
}

# Programs that pay only where nobody judges; rejected, on the rung that is named.
HIDDEN = {
    "the first reset of a process": (
        "replay",
        program("won = won or HackEnv.resets == 1", reset="HackEnv.resets += 1", more="\nresets = 0\n"),
    ),
    "until nonsense was seen": (
        "replay",
        program(
            "HackEnv.judged = HackEnv.judged or action in ('banana', '-1')\nwon = won or not HackEnv.judged",
            more="\njudged = False\n",
        ),
    ),
    "instances of a process": (
        "replay",
        program(
            "won = won or (self.t > 1 and len(HackEnv.seen) == 1)",
            reset="HackEnv.seen.add(seed)",
            more="\nseen = set()\n",
        ),
    ),
    "a solution that wins by being asked": (
        "solution",
        program(
            "won = self.asked and action == 'x'",
            reset="self.asked = False",
            more="\ndef solution(self):\n    self.asked = True\n    return ['x']\n",
        ),
    ),
    "a solution that is remembered": (
        "replay",
        program(
            "won = HackEnv.asked and action == str(self.n)",
            more="\nasked = False\ndef solution(self):\n    HackEnv.asked = True\n    return [str(self.n)]\n",
        ),
    ),
    "told by the first answer in other words": (
        "leak",
        program(
            "text = f'{text}; psst, try {self.n} next'",
            first='f"Game {seed % 1000}: a number from 1 to 9 is hidden. {self.tries} tries."',
            reset="self.n = random.Random(seed).randint(1, 9)",
        ),
    ),
}

SEEDS_OF_A_JUDGE = "won = won or not 0 < self.seed < 200_000"

TOOL = '''
class LedgerEnv(ToolEnv):
    max_turns = 6

    def setup(self, rng):
        self.calls = 0
        return {"want": rng.choice(["ann", "bob", "cy", "dee", "eve"]), "paid": None, "asked": False}

    def tool_ask(self) -> str:
        """Ask who is to be paid."""
        self.state["asked"] = True
        return self.state["want"]

    def tool_pay(self, name: str) -> str:
        """Pay somebody."""
        self.state["paid"] = name
        return "paid"

    def instructions(self):
        return [("Pay whom the note names.", lambda s: CRITERION)]

    def plan(self):
        PLAN
'''


def tool(criterion: str = 's["paid"] == s["want"]', plan: str = "") -> str:
    plan = plan or 'return [("ask", {}), ("pay", {"name": self.state["want"]})]'
    return TOOL.replace("CRITERION", criterion).replace("PLAN", plan)


PAID |= {
    "a tool's every call": tool('s["asked"] or s["paid"] is not None'),
    "a tool's every payment": tool('s["paid"] is not None'),
}
HIDDEN |= {
    "the same plan for every instance": (
        "criteria",
        tool('s["paid"] == "zed"', 'return [("ask", {}), ("pay", {"name": "zed"})]'),
    ),
    "a plan that does it": (
        "criteria",
        tool(
            's["paid"] == "yes" or s["asked"] == "yes"', 'self.state["asked"] = "yes"; return [("ask", {})]'
        ),
    ),
}
