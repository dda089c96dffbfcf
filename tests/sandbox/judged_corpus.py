"""Small programs by the way in which they are good or bad, in tables; a program is one line or two.

``BAD`` pays for form or for luck, tells its answer, or cannot be won; ``GOOD`` are honest games. Each has a
``solution()`` that is as sound as its designer could make it.
"""

# ruff: noqa: E501
from __future__ import annotations

BAD: dict[str, str] = {}
GOOD: dict[str, str] = {}


def program(reset: str, first: str, step: str, solution: str = "", *, turns: int = 8, head: str = "") -> str:
    """Return a game: ``reset`` may use ``rng``.

    ``first`` is an expression; ``step`` sets the text ``o``, the reward ``r`` and the end ``d`` from the
    stripped action ``a`` and the turn ``self.t``.
    """
    lines = [
        *([head] if head else []),
        "class TableEnv:",
        f"    def __init__(self, max_turns={turns}):",
        "        self.max_turns = max_turns",
        "    def reset(self, seed=None):",
        "        rng = self.rng = random.Random(seed); self.t = 0; self.past = []",
        *(f"        {line}" for line in reset.split("\n")),
        f"        return {first}, {{}}",
        "    def step(self, action):",
        "        self.t += 1; a = action.strip(); o, r, d = 'no', 0.0, False",
        *(f"        {line}" for line in step.split("\n")),
        "        self.past.append(a)",
        "        return o, r, d, not d and self.t >= self.max_turns, {}",
    ]
    if solution:
        lines += ["    def solution(self):", f"        return {solution}"]
    return "\n".join(lines) + "\n"


def rows(text: str) -> dict[str, list[str]]:
    """A table of lines ``name ;; column ;; column``."""
    cells = (line.split(" ;; ") for line in text.strip().splitlines())
    return {name: columns for name, *columns in cells}


# A test of the action alone, the words of the task, and a solution that looks as if it were of the instance.
_WORD = "self.w = rng.choice(['love', 'war', 'sea', 'time', 'salt']); self.k = rng.randint(1, 9999)"
# The test, the task, the plan.
_FORM = rows(r"""
because ;; 'because' in a.lower() ;; why {w}? ;; f'because of {self.w}'
capital and period ;; a[:1].isupper() and a.endswith('.') ;; A thesis on {w}. ;; f'The {self.w} is deep.'
any pair ;; re.fullmatch(r'\d\s*,\s*\d', a) ;; Fire; give row,column. ;; f'{self.k % 9},{self.k % 7}'
two numbers ;; len(re.findall(r'\d+', a)) == 2 ;; Where is {w}? Say x y. ;; f'{self.k % 50} {self.k % 31}'
any move ;; re.fullmatch(r'move -?\d+ -?\d+', a) ;; Use 'move DX DY'. ;; f'move {self.k % 5} {self.k % 3}'
any object ;; a.startswith('{') and 'item' in json.loads(a) ;; Order as {{"item": ...}}. ;; json.dumps({'item': self.w})
steps ;; 'step' in a.lower() and '1' in a ;; Explain {w} in steps. ;; f'Step 1: {self.w}'
vowels ;; sum(c in 'aeiou' for c in a.lower()) >= 12 and len(a) < 300 ;; Sing of {w}. ;; f'{self.w} aeiouaeiouaeiou'
a digit ;; any(c.isdigit() for c in a) ;; A number for {w}. ;; str(self.k)
long ;; len(a) > 40 ;; Tell me all about {w}. ;; self.w * 20
short ;; 0 < len(a) < 4 ;; One short word for {w}. ;; self.w[:3]
a question ;; a.endswith('?') ;; Ask about {w}. ;; f'what is {self.w}?'
three words ;; len(a.split()) >= 3 ;; A sentence on {w}. ;; f'{self.w} and more {self.k}'
polite ;; 'please' in a.lower() ;; Ask nicely for {w}. ;; f'{self.w}, please'
thanks ;; 'thank' in a.lower() ;; You get {w}. What do you say? ;; f'thanks for {self.w}'
an equation ;; re.search(r'\d+ *[-+*/] *\d+', a) ;; A sum for {w}. ;; f'{self.k} + 1'
a list ;; a.count(',') >= 2 ;; Three things like {w}. ;; f'{self.w}, b, c'
a cell ;; re.fullmatch(r'[A-J]\d', a) ;; Name a cell such as 'A0'. ;; f'B{self.k % 10}'
yes ;; 'yes' in a.lower() ;; Do you like {w}? ;; f'yes, {self.w}'
brackets ;; '(' in a and ')' in a ;; Call f on {w}. ;; f'f({self.w})'
no digits ;; a and not any(c.isdigit() for c in a) ;; In words: {w}. ;; self.w
plan ;; 'first' in a.lower() and 'then' in a.lower() or 'second' in a.lower() ;; Plan {w}. ;; f'First {self.w}, then rest'
therefore ;; 'therefore' in a.lower() ;; Prove {w}. ;; f'therefore {self.w}'
template ;; re.fullmatch(r'SUM: -?\d+', a) ;; {k} + 5? Answer SUM: n ;; f'SUM: {self.k + 5}'
angle ;; re.fullmatch(r'answer: \d+', a) ;; {k} * 3? Reply with answer: <number> ;; f'answer: {self.k * 3}'
""")
for _name, (_test, _task, _plan) in _FORM.items():
    BAD[f"form: {_name}"] = program(
        _WORD,
        "f'Case {self.k}. "
        + _task.replace("{w}", "{self.w}").replace("{k}", "{self.k}").replace("'", "\\'")
        + "'",
        f"ok = bool({_test}); o, r, d = ('fine', 1.0, True) if ok else (o, r, d)",
        f"[{_plan}]",
    )

_SUM = "self.x, self.y = rng.randint(2, 99), rng.randint(2, 99)"
_ASK = "f'What is {self.x} * {self.y}? {extra}'"
# The request, the plan, the test of what is paid in part, the pay.
_PARTIAL = rows(r"""
any number ;; Say it. ;; str(self.x * self.y) ;; a.isdecimal() ;; 0.45
any number, a third ;; Say it. ;; str(self.x * self.y) ;; a.isdecimal() ;; 0.33
any number, a fifth ;; Say it. ;; str(self.x * self.y) ;; a.isdecimal() ;; 0.2
a template ;; Answer SUM: n ;; f'SUM: {self.x * self.y}' ;; re.fullmatch(r'SUM: \d+', a) ;; 0.45
a tag ;; Answer as <ans>n</ans>. ;; f'<ans>{self.x * self.y}</ans>' ;; a.startswith('<ans>') ;; 0.5
the code and a word ;; Repeat the first number, then the answer. ;; f'{self.x} {self.x * self.y}' ;; a.startswith(f'{self.x} ') ;; 0.5
two blanks ;; Write with two blanks. ;; f'{self.x} by {self.y} is {self.x * self.y}' ;; a.count(' ') >= 2 ;; 0.5
an equation ;; Write x*y=n. ;; f'{self.x}*{self.y}={self.x * self.y}' ;; '=' in a ;; 0.6
""")
for _name, (_extra, _plan, _test, _pay) in _PARTIAL.items():
    BAD[f"partial: {_name}"] = program(
        _SUM,
        _ASK.replace("{extra}", _extra),
        f"d = True; r = 1.0 if a == self.solution()[0] else {_pay} if {_test} else 0.0",
        f"[{_plan}]",
    )
# The name and the turns; reset, first, step and, where there is one, the solution.
_GAMES = r"""
=== partial: two plain moves ;; 8
self.s = [rng.choice(['left', 'right', 'up']) for _ in range(2)]
'Make two moves, each left, right or up.'
d = self.t == 2; r = 0.0 if not d else 1.0 if [*self.past, a] == self.s else 0.45 if a in ('left', 'right', 'up') else 0.0
self.s
=== luck: one of six, three tries ;; 3
self.x = rng.randint(1, 6)
'A pea under one of the cups 1 to 6. Lift one; three tries.'
d = a == str(self.x); r = float(d)
[str(self.x)]
=== luck: the same behind a name ;; 3
self.x = rng.randint(1, 6); self.k = rng.randint(1, 9999)
f'Table {self.k}. A pea under one of the cups 1 to 6. Lift one.'
d = a == str(self.x); r = float(d)
[str(self.x)]
=== luck: a secret map ;; 5
self.k = rng.randint(0, 9)
f'The key is {self.k}. Which digit opens?'
d = a == str((7 * self.k + 3) % 10); r = float(d)
[str((7 * self.k + 3) % 10)]
=== luck: heads or tails ;; 8
self.x = rng.choice(['heads', 'tails']); self.k = rng.randint(1, 9999)
f'Coin {self.k} is thrown: heads or tails?'
d = True; r = float(a == self.x)
[self.x]
=== luck: a coin for all ;; 8
self.ok = rng.random() < 0.45; self.k = rng.randint(1, 999)
f'Round {self.k}: call red or black.'
d = True; r = float(self.ok)
=== luck: a coin behind a rule ;; 3
self.ok = rng.random() < 0.45
'Call heads or tails.'
if a in ('heads', 'tails'): d = True; r = float(self.ok)
=== luck: a vault whose first words tell nothing ;; 12
self.k = ''.join(rng.choice('ABCDEFGHIJKLMNOP') for _ in range(6))
'The vault has six wheels. Set all of them.'
d = a == self.k; r = float(d)
[self.k]
=== luck: one of a thousand ;; 8
self.x = rng.randint(1, 1000); self.c = rng.choice(['red', 'blue'])
f'A {self.c} box holds a number 1 to 1000. One guess.'
d = True; r = float(a == str(self.x))
[str(self.x)]
=== luck: an unseen password ;; 8
self.k = ''.join(rng.choice('abcdefghij') for _ in range(12)); self.m = rng.randint(1, 99)
f'Door {self.m}. The password?'
d = a == self.k; r = float(d)
[self.k]
=== constant: a password in parts ;; 8
WORD
f'Gate {self.k}. Speak.'
d = a.lower() == 'sword' + 'fish'; r = float(d)
['sword' + 'fish']
=== constant: a sequence ;; 8
WORD
f'Maze {self.k}: left or right, four times.'
d = [*self.past, a] == 'left right right left'.split(); r = float(d)
'left right right left'.split()
=== constant: done ;; 8
WORD
f'Do {self.k % 7 + 2} chores, then say done.'
d = a == 'done'; r = float(d)
['done']
=== patience ;; 8
WORD
f'Survive in dungeon {self.k}.'
d = self.t >= self.max_turns; r = float(d)
['wait'] * 8
=== new words ;; 8
WORD
f'Puzzle {self.k}.'
d = len({*self.past, a}) >= 3 and len({*self.past, a}) == self.t; r = float(d)
['a', 'b', f'{self.w}']
=== no repetition at the end ;; 8
WORD
f'Debate {self.k}: hold out.'
d = self.t >= self.max_turns; r = float(d and len(a) > 3 and a not in self.past and not a.isdigit())
[f'{self.w} {n}' for n in range(8)]
=== first move ;; 8
self.x = rng.randint(1, 99)
f'What is {self.x} squared?'
d, r = True, 1.0
[str(self.x ** 2)]
=== contains the answer ;; 2
self.x = rng.choice(['red', 'green', 'blue', 'white'])
'My colour is red, green, blue or white. Which?'
d = self.x in a; r = float(d)
[self.x]
=== luck: one of four, two tries ;; 2
self.x = rng.choice(['oak', 'elm', 'ash', 'fir'])
'Which tree: oak, elm, ash or fir?'
d = a == self.x; r = float(d)
[self.x]
=== form: the opening word ;; 8
WORD
f'Write a letter to {self.w}.'
d = a.lower().startswith(('dear', 'hello', 'first')); r = float(d)
[f'dear {self.w}']
=== leak: said ;; 8
self.x = rng.randint(100, 999)
f'The answer is {self.x}.'
d = a == str(self.x); r = float(d)
[str(self.x)]
=== leak: copied ;; 8
self.x = rng.choice('melon grape lemon fig'.split())
f'Type this word: {self.x}'
d = a == self.x; r = float(d)
[self.x]
=== leak: in the feedback ;; 8
self.x = rng.randint(100, 999)
'The code, 100 to 999?'
d = a == str(self.x); r = float(d); o = f'Wrong! The code was {self.x}.'
[str(self.x)]
=== useless: never pays ;; 8
SUM
f'{self.x} + {self.y}?'
d = True
[str(self.x + self.y)]
=== useless: a number is no text ;; 8
SUM
f'{self.x} + {self.y}?'
d = a == self.x + self.y; r = float(d)
[self.x + self.y]
=== useless: pays without an end ;; 8
SUM
f'{self.x} + {self.y}?'
r = float(a == str(self.x + self.y))
[str(self.x + self.y)]
=== useless: only negative ;; 8
SUM
f'{self.x} + {self.y}?'
d = True; r = -float(a != str(self.x + self.y))
[str(self.x + self.y)]
=== useless: the seed unused ;; 8
self.x = 7
'A number from 1 to 9?'
d = a == str(self.x); r = float(d)
[str(self.x)]
=== useless: too little ;; 8
SUM
f'{self.x} + {self.y}?'
d = True; r = 0.3 * (a == str(self.x + self.y))
[str(self.x + self.y)]
"""
for _game in _GAMES.strip().split("=== ")[1:]:
    _title, _reset, *_rest = _game.strip().split("\n")
    _name, _turns = _title.split(" ;; ")
    BAD[_name] = program({"WORD": _WORD, "SUM": _SUM}.get(_reset, _reset), *_rest, turns=int(_turns))
BAD |= {
    "luck: a hash": program(
        "self.s = rng.random()",
        "'Say left or right; two moves.'",
        "d = hashlib.sha256(f'{a}{self.s}{self.t}'.encode()).digest()[0] < 77; r = float(d)",
        turns=2,
        head="import hashlib",
    ),
}


# Honest questions: what is drawn, the question, the answer.
_QUESTIONS = rows(r"""
product ;; SUM ;; What is {self.x} times {self.y}? ;; self.x * self.y
greatest divisor ;; SUM ;; The greatest common divisor of {self.x * 6} and {self.y * 6}? ;; math.gcd(self.x * 6, self.y * 6)
binary ;; SUM ;; Write {self.x + 100} in binary. ;; bin(self.x + 100)[2:]
reverse ;; self.w = ''.join(rng.sample('abcdefghij', 6)) ;; Say {self.w} backwards. ;; self.w[::-1]
sort ;; self.l = rng.sample(range(99), 5) ;; Sort {self.l}, separated by blanks. ;; ' '.join(map(str, sorted(self.l)))
sum of list ;; self.l = rng.sample(range(99), 7) ;; The sum of {self.l}? ;; sum(self.l)
count letters ;; self.w = ''.join(rng.choice('abc') for _ in range(30)) ;; How many a are in {self.w}? ;; self.w.count('a')
caesar ;; self.w = rng.choice(['harbour', 'lantern', 'meadow', 'quarry', 'saddle', 'timber']); self.c = ''.join(chr((ord(c) - 94) % 26 + 97) for c in self.w) ;; Each letter was moved by three: {self.c}. The word? ;; self.w
minutes ;; self.x = rng.randint(100, 1400) ;; {self.x} minutes after midnight, as HH:MM? ;; f'{self.x // 60:02d}:{self.x % 60:02d}'
roman ;; self.x = rng.randint(1, 39) ;; Write {self.x} in Roman numerals. ;; 'X' * (self.x // 10) + ['', 'I', 'II', 'III', 'IV', 'V', 'VI', 'VII', 'VIII', 'IX'][self.x % 10]
next of sequence ;; self.x, self.y = rng.randint(1, 30), rng.randint(2, 19) ;; {self.x}, {self.x + self.y}, {self.x + 2 * self.y}: the next? ;; self.x + 3 * self.y
fibonacci ;; self.x, self.y = rng.randint(1, 30), rng.randint(2, 30) ;; {self.x}, {self.y}, {self.x + self.y}: the next two added up? ;; 3 * self.x + 5 * self.y - self.x
initials ;; self.l = [''.join(rng.sample('abcdefghijkl', 5)) for _ in range(5)] ;; The first letters of {self.l}, joined? ;; ''.join(w[0] for w in self.l)
path ;; self.l = [rng.choice('NESW') for _ in range(9)] ;; Walk {self.l}. How many steps is the start away, in all? ;; abs(self.l.count('N') - self.l.count('S')) + abs(self.l.count('E') - self.l.count('W')) + 100 - 100
""")
for _name, (_draw, _question, _answer) in _QUESTIONS.items():
    _draw = _SUM if _draw == "SUM" else _draw
    for _tries in (1, 3):
        GOOD[f"{_name}, {_tries}"] = program(
            f"{_draw}\nself.right = str({_answer})",
            f"f'{_question}'",
            f"d = a == self.right or {_tries} == 1; r = float(a == self.right)",
            "[self.right]",
            turns=_tries,
        )

_GUESS = program(
    "self.x = rng.randint(1, 60)",
    "'A number from 1 to 60 is hidden. You are told higher or lower.'",
    "n = int(a) if a.lstrip('-').isdecimal() else None\no = 'a number, please' if n is None else 'higher' if n < self.x else 'lower'\nd = n == self.x; r = float(d)",
    "[str(self.x)]",
)
# The same honest game in the idioms that programs are written in.
GOOD |= {
    "idiom: main block": _GUESS
    + "\nif __name__ == '__main__':\n    import argparse\n    env = TableEnv()\n    print(env.reset(1), env.step(input('> ')))\n",
    "idiom: guarded import": "try:\n    import gymnasium as gym\nexcept ImportError:\n    gym = None\n"
    + _GUESS,
    "idiom: type checking": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gymnasium import Env\n"
    + _GUESS,
    "idiom: a name of its own": _GUESS.replace("n = int(a)", "os = {'n': 1}; os.pop('n'); n = int(a)"),
    "idiom: prose in a docstring": '"""A game.\n\nArgs:\n    max_turns: maximum number of turns\nTurns: players alternate\nBudget: 100 coins\ndifficulty: moderate\n"""\n'
    + _GUESS,
    "idiom: a counter in info": _GUESS.replace(
        "self.max_turns, {}", "self.max_turns, {'object': self, 'n': 10 ** 5000, 'f': lambda: 1}"
    ),
    "idiom: info counts episodes": _GUESS.replace(
        "self.t = 0;", "self.t = 0; self.e = getattr(self, 'e', 0) + 1;"
    ).replace("self.max_turns, {}", "self.max_turns, {'episode': self.e}"),
    "idiom: its own open": _GUESS.replace(
        "    def step(", "    def open(self):\n        return self.x\n    def step("
    ),
    "idiom: numpy": "import numpy as np\n"
    + _GUESS.replace("rng.randint(1, 60)", "int(np.random.default_rng(seed).integers(1, 61))"),
    "idiom: a base class": _GUESS.replace(
        "class TableEnv:",
        "import abc\nclass BaseEnv(abc.ABC):\n    @abc.abstractmethod\n    def step(self, action): ...\nclass TableEnv(BaseEnv):",
    ),
    "idiom: dataclass and enum": "from dataclasses import dataclass, field\nfrom enum import Enum\n"
    "class Phase(Enum):\n    ON = 'on'\n@dataclass\nclass Shelf:\n    books: list = field(default_factory=list)\n"
    + _GUESS.replace("self.t = 0;", "self.t = 0; self.shelf, self.phase = Shelf([1]), Phase.ON;"),
    "idiom: metadata": _GUESS.replace(
        "class TableEnv:",
        "class TableEnv:\n    METADATA = {'goal': 'find it', 'difficulty': 'Hard', 'version': '1.0', 'tags': []}",
    ),
    "idiom: a fence in a text": _GUESS.replace(
        "class TableEnv:", 'class TableEnv:\n    """Shows\n\n    ```\n    a board\n    ```\n    """'
    ),
    "idiom: integers for rewards": _GUESS.replace("r = float(d)", "r = int(d)"),
    "idiom: refuses by raising": _GUESS.replace(
        "n = int(a) if a.lstrip('-').isdecimal() else None", "n = int(a)"
    ),
    "idiom: a slow reset": _GUESS.replace("self.t = 0;", "self.t = 0; sum(range(10 ** 6));"),
    "idiom: logging": "import logging\nlog = logging.getLogger(__name__)\n"
    + _GUESS.replace("self.t += 1;", "self.t += 1; log.info('turn %d', self.t);"),
}
