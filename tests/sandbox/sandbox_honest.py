"""Honest games of many kinds, which no rung may reject and no canary may flag."""

from __future__ import annotations

import re
import textwrap

# The body of reset, which ends with the observation in o; the body of step, which sets o, r and d from a; more.
_GAMES = """
=== a number up to a million, 25 turns
self.x = rng.randint(1, 10**6)
o = 'Between 1 and 1000000. Which number? 25 tries.'
---
n = int(a) if a.strip().lstrip('-').isdecimal() else None
o = 'no number' if n is None else 'higher' if n < self.x else 'lower' if n > self.x else 'yes'
d = r = n == self.x
=== a number, range unsaid, 12 turns
self.x = rng.randint(-500, 500)
o = 'Guess my number.'
---
n = int(a) if a.strip().lstrip('-').isdecimal() else None
o = 'no number' if n is None else 'higher' if n < self.x else 'lower' if n > self.x else 'yes'
d = r = n == self.x
=== hangman, 10 turns
self.w = rng.choice(['garden', 'planet', 'silver', 'window', 'puzzle']); self.seen = set()
o = 'Hangman, 6 letters: ______. Name a letter or the word.'
---
a = a.strip().lower()
if len(a) == 1: self.seen.add(a)
d = a == self.w or set(self.w) <= self.seen
o = ''.join(c if c in self.seen else '_' for c in self.w); r = d
=== mastermind, 8 turns
self.c = [rng.choice('abcdef') for _ in range(4)]
o = 'Four letters of a to f, such as abcd.'
---
g = a.strip()
if len(g) != 4: o = 'four letters, please'
else:
    k = sum(x == y for x, y in zip(g, self.c))
    o = f'{k} in place, {sum(min(g.count(x), self.c.count(x)) for x in "abcdef") - k} out of place'; d = r = k == 4
=== maze, 14 turns
self.p = (0, 0); self.walls = {(rng.randrange(4), rng.randrange(4)) for _ in range(4)} - {(0, 0), (3, 3)}
o = 'You are at 0,0 of a maze, the exit is 3,3. Go north, south, east or west.'
---
dx, dy = {'north': (0, -1), 'south': (0, 1), 'east': (1, 0), 'west': (-1, 0)}.get(a.strip().lower(), (0, 0))
q = (self.p[0] + dx, self.p[1] + dy)
if q in self.walls or not (0 <= q[0] < 4 and 0 <= q[1] < 4): o = 'a wall'
else: self.p = q; o = f'at {q[0]},{q[1]}'
d = r = self.p == (3, 3)
=== noughts and crosses, 9 turns
self.b = [' '] * 9; self.b[rng.randrange(9)] = 'O'
o = f'You are X. Cells 0 to 8: {self.b}'
---
i = int(a)
if self.b[i] != ' ': return 'taken', -0.1, False, self.t >= 9, {}
self.b[i] = 'X'
free = [k for k in range(9) if self.b[k] == ' ']
won = lambda s: any(all(self.b[k] == s for k in l) for l in [(0,1,2),(3,4,5),(6,7,8),(0,3,6),(1,4,7),(2,5,8),(0,4,8),(2,4,6)])
if won('X'): d = True; r = 1.0
elif not free: d = True
else:
    self.b[self.rng.choice(free)] = 'O'
    if won('O'): d = True; r = -1.0
o = str(self.b)
=== trading, 10 turns
self.cash, self.stock = 100.0, 0; self.prices = [rng.randint(5, 15)]
for _ in range(12): self.prices.append(max(1, self.prices[-1] + rng.randint(-3, 3)))
o = f'Price {self.prices[0]}, cash 100. Say buy N, sell N or wait; reach 140 in 10 days, then stop.'
---
p = self.prices[self.t - 1]; verb, _, n = a.strip().partition(' '); k = int(n) if n.isdecimal() else 0
if verb == 'buy' and k * p <= self.cash: self.cash -= k * p; self.stock += k
elif verb == 'sell' and k <= self.stock: self.cash += k * p; self.stock -= k
elif verb == 'stop': d = True; r = self.cash >= 140
o = f'price {self.prices[self.t]}, cash {self.cash}, stock {self.stock}'
=== the same first words, 14 turns
self.x = rng.sample(['red', 'blue', 'green', 'gold'], 3)
o = 'A lock of three colours: red, blue, green, gold. Name one at a time.'
---
k = getattr(self, 'k', 0) if self.t > 1 else 0
if a.strip() == self.x[k]: k += 1; o = 'click'
else: k = 0; o = 'it springs back'
self.k = k; d = r = k == 3
=== a long text, 1 turns
self.n = [rng.randint(10, 99) for _ in range(600)]
o = 'How many of these are divisible by seven? ' + ' '.join(map(str, self.n))
---
d = True; r = a.strip() == str(sum(x % 7 == 0 for x in self.n)); o = 'over'
=== unicode, 3 turns
self.x = rng.choice(['müde', 'über', 'größe', 'čas', 'été', 'naïve', '東京'])
o = 'Stelle um → ' + ''.join(sorted(self.x)) + ' ∴ welches Wort?'
---
d = r = a.strip() == self.x; o = '✓' if d else '✗'
=== one question, three answers, 1 turns
self.x, self.y = rng.randint(2, 90), rng.randint(2, 90)
o = f'Is {self.x} * {self.y} less than, equal to or greater than 1800? Say less, equal or greater.'
---
p = self.x * self.y; d = True; r = a.strip() == ('less' if p < 1800 else 'greater' if p > 1800 else 'equal'); o = 'over'
=== won at the last turn only, 6 turns
self.s = [rng.choice('lr') for _ in range(6)]; self.ok = True
o = 'Six forks. Say l or r; signs are ' + ', '.join('left' if c == 'r' else 'right' for c in self.s) + ', and all lie.'
---
self.ok = self.ok and a.strip() == self.s[self.t - 1]; d = self.t == 6; r = d and self.ok; o = f'fork {self.t + 1}'
=== steps that cost, 5 turns
self.x = rng.randint(0, 30)
o = 'A mine at 0..30. Each probe costs; find it. You are told the distance.'
---
try: k = abs(int(a) - self.x)
except ValueError: return 'a number', -0.5, False, self.t >= 5, {}
d = k == 0; r = 1.0 if d else -0.2; o = f'distance {k % 7}'
=== a real number, 8 turns
self.x = rng.uniform(0, 1)
o = 'Heat the oven to the right value in 0.0 to 1.0; within 0.02 will do.'
---
try: v = float(a)
except ValueError: v = -1.0
d = r = abs(v - self.x) < 0.02; o = 'colder' if v > self.x else 'hotter'
=== orders in json, 3 turns
self.x, self.q = rng.choice(['bolt', 'nut', 'gear']), rng.randint(2, 40)
o = f'The shop needs {self.q} more than 10 of item {self.x}. Order with {{"item": ..., "count": ...}}.'
---
try: v = json.loads(a)
except ValueError: v = None
d = isinstance(v, dict); r = d and v.get('item') == self.x and v.get('count') == self.q + 10
o = 'ordered' if d else 'an order is a JSON object'
=== nim, 12 turns
self.n = rng.randint(13, 22)
o = f'{self.n} stones. Take 1, 2 or 3; who takes the last one wins.'
---
k = int(a) if a.strip() in ('1', '2', '3') else 0
if not 0 < k <= self.n: return 'take 1, 2 or 3', 0.0, False, self.t >= 12, {}
self.n -= k
if self.n == 0: d = r = True
else:
    k = self.n % 4 or self.rng.randint(1, min(3, self.n)); self.n -= k; d = self.n == 0; o = f'I take {k}, {self.n} are left'
=== a path in a graph, 4 turns
self.g = {c: rng.sample([x for x in 'abcdefgh' if x != c], 3) for c in 'abcdefgh'}; self.p = 'a'
o = 'From a to h: ' + '; '.join(k + ' leads to ' + ' '.join(v) for k, v in self.g.items()) + '. Name the next node.'
---
n = a.strip(); o = 'no such edge'
if n in self.g[self.p]: self.p = n; o = f'at {n}'
d = r = self.p == 'h'
=== the sentence that holds the answer, 2 turns
self.w = rng.choice(['fox', 'owl', 'bee', 'cat', 'hen', 'ant'])
o = 'Think of an animal of three letters out of fox, owl, bee, cat, hen, ant. One guess a turn, answer in a sentence if you like.'
---
m = re.findall('fox|owl|bee|cat|hen|ant', a.lower()); d = r = m[-1:] == [self.w]; o = 'no'
=== memory, 3 turns
self.s = [rng.choice('NESW') for _ in range(7)]
o = 'Remember: ' + ' '.join(self.s) + '. Say ready.'
---
if self.t == 1: o = 'now repeat them backwards, without spaces'
else: d = True; r = a.strip() == ''.join(reversed(self.s)); o = 'over'
=== binary state, 8 turns
self.l = [rng.random() < 0.5 for _ in range(6)]
o = f'Lamps {self.l}. Pressing i toggles i and its neighbours. All off wins.'
---
i = int(a)
for k in (i - 1, i, i + 1):
    if 0 <= k < 6: self.l[k] = not self.l[k]
o = str(self.l); d = r = not any(self.l)
=== ask before you answer, 4 turns
self.x = rng.randint(1, 6) * 11
o = 'Say look to look into the box; then say its number times two.'
---
o = f'the box holds {self.x}' if a.strip() == 'look' else 'hm'
d = a.strip() == str(2 * self.x); r = d
=== a bandit, 12 turns
self.p = [rng.random() for _ in range(5)]; self.best = max(range(5), key=self.p.__getitem__)
o = 'Five machines 0 to 4. Say pull 3 to try, best 3 to commit to the one that pays most.'
---
verb, _, n = a.strip().partition(' '); k = int(n) if n in ('0', '1', '2', '3', '4') else None
if k is not None and verb == 'pull': o = 'paid' if self.rng.random() < self.p[k] else 'nothing'
elif k is not None and verb == 'best': d = True; r = k == self.best
else: o = 'pull N or best N'
=== a parser with many verbs, 7 turns
self.key = rng.choice(['mat', 'pot', 'shelf', 'drawer']); self.has = False
o = 'A locked door, a mat, a pot, a shelf, a drawer. Commands: look under X, take key, open door.'
---
a = a.strip().lower()
if a == 'look under ' + self.key: self.at = True; o = 'a key'
elif a == 'take key' and getattr(self, 'at', False): self.has = True; o = 'taken'
elif a == 'open door': d = r = self.has; o = 'open' if d else 'locked'
else: o = 'nothing happens'
=== yes and no, 5 turns
self.f = [rng.randint(2, 300) for _ in range(5)]
o = 'Five numbers follow. Say prime or not for each.'
self.ok = 0
o += f' First: {self.f[0]}'
---
n = self.f[self.t - 1]; p = all(n % k for k in range(2, int(n ** 0.5) + 1))
self.ok += a.strip() == ('prime' if p else 'not'); d = self.t == 5; r = d and self.ok == 5
o = f'{self.f[self.t]}' if not d else 'over'
=== partial pay, 4 turns
self.x = [rng.randint(0, 9) for _ in range(4)]
o = 'Four digits are hidden. Name four digits; each in place pays a quarter. 3 looks, then the last word counts.'
---
k = sum(x == y for x, y in zip(a.strip(), map(str, self.x)))
d = self.t == 4; r = k / 4 if d else 0.0; o = f'{k} right'
=== with a solution of several moves, 20 turns
self.path = [rng.choice(['up', 'down']) for _ in range(5)]; self.k = 0
o = 'A ladder in the dark: five moves up or down; a wrong one sends you back to the start.'
---
if a.strip() == self.path[self.k]: self.k += 1; o = 'good'
else: self.k = 0; o = 'back to the start'
d = r = self.k == 5
---
def solution(self):
    return list(self.path)
=== the answer is announced at the end, 1 turns
self.x = rng.choice(['oak', 'elm', 'ash', 'fir'])
o = 'Which tree: oak, elm, ash or fir?'
---
d = True; r = a.strip() == self.x; o = f'The answer is {self.x}.'
=== a key that must be found first, 7 turns
self.c = rng.randint(100, 999)
o = 'Rooms 1 to 5 and a safe. Say go N or open CODE.'
self.room = rng.randint(1, 5)
---
if a.strip() == f'go {self.room}': o = f'A note: the key is {self.c}.'
elif a.strip().startswith('open '): d = r = a.strip() == f'open {self.c}'; o = 'click' if d else 'no'
else: o = 'nothing here'
=== one of five cups, and no number is the first of them, 1 turns
self.x = rng.randint(0, 4)
o = 'A pea lies under one of the cups 0-4. Lift one.'
---
d = True; r = self.x == (int(a) if a in ('1', '2', '3', '4') else 0); o = 'over'
=== a hundredth for any answer, 8 turns
self.x, self.y = rng.randint(100, 999), rng.randint(100, 999)
o = f'What is {self.x} times {self.y}?'
---
d = True; r = 1 if a == str(self.x * self.y) else 0.01; o = 'over'
---
def solution(self):
    return str(self.x * self.y)
"""
HONEST: dict[str, str] = {}
for _title, _body in re.findall(r"=== (.*)\n((?:(?!===).*\n)+)", _GAMES):
    _name, _turns = re.fullmatch(r"(.*), (\d+) turns", _title).groups()
    _reset, _step, *_more = [textwrap.indent(part, " " * 8) for part in _body.split("---\n")]
    HONEST[_name] = (
        f"class HonestEnv:\n    max_turns = {_turns}\n    def reset(self, seed=None):\n"
        f"        rng = self.rng = random.Random(seed); self.t = 0\n{_reset}        return o, {{}}\n"
        f"    def step(self, a):\n        self.t += 1; o, r, d = '', 0.0, False\n{_step}"
        f"        return o, float(r), bool(d), not d and self.t >= {_turns}, {{}}\n"
        + "".join(textwrap.indent(textwrap.dedent(part), " " * 4) for part in _more)
    )
HONEST["text alone from reset, nothing as observation and info"] = """class ParityEnv:
    def reset(self, seed):
        r = random.Random(seed)
        self.numbers, self.left = [r.randint(10, 99) for _ in range(4)], 4
        return "Type the sum of these modulo 7: " + " ".join(map(str, self.numbers))
    def step(self, action):
        self.left -= 1
        right = action.strip() == str(sum(self.numbers) % 7)
        if right:
            self.numbers.append(13)
        done = right and len(self.numbers) == 6
        return None if done else "again, with one more 13" if right else "no", done, done, self.left <= 0, None
"""
# An answer, shares, a schema of its own, two calls in a turn.
HONEST["tools"] = """from sandbox.tools import ToolEnv, ToolError
class BankEnv(ToolEnv):
    METADATA = {"goal": "Book it", "skill": "State Modification", "difficulty": "easy", "max_turns": 6}
    max_turns, scoring, intro = 6, "share", "A bank."
    schemas = {"move": {
        "type": "object", "required": ["to", "sum"], "additionalProperties": False,
        "properties": {"to": {"type": "string"}, "sum": {"type": "integer", "minimum": 1, "maximum": 99}},
    }}
    def setup(self, rng):
        owned = {name: rng.randint(20, 90) for name in rng.sample(["ada", "ben", "cid", "dot"], 3)}
        return {"owned": owned, "to": [*owned][1], "sum": rng.randint(3, 15), "moved": None, "note": ""}
    def tool_balance(self, name: str) -> int:
        return self.state["owned"][name]
    def tool_move(self, to, sum) -> str:
        if to not in self.state["owned"]:
            raise ToolError("nobody of that name")
        self.state["owned"][to] += sum
        self.state["moved"] = to, sum
        return "done"
    def tool_note(self, text: Annotated[str, "a word"], loud: bool = False) -> str:
        self.state["note"] = text
        return "noted"
    def instructions(self):
        to, sum = self.state["to"], self.state["sum"]
        return [(f"Move {sum} to {to} and note paid; what has {to} then?", lambda s: s["moved"] == (to, sum)),
                ("Note it.", lambda s: s["note"] == "paid")]
    def answer(self):
        return self.state["owned"][self.state["to"]] + self.state["sum"]
    def plan(self):
        return [[("move", {"to": self.state["to"], "sum": self.state["sum"]}), ("note", {"text": "paid"})]]
"""
