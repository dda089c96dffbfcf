"""Seed families of tool environments: two instructions over a state, two or three tools.

They differ from games in the base class of their programs and in what players write: calls in the form
of the nano chat template. Each hides something that its hint tells, and an error teaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

from engine.nano.seeds.base import LEVELS, Family, Parameters, Script, count, numbers, within

_WAYS = ("blue", "red", "tan")
# How often a player that does not think writes calls that cannot be read.
_GARBLED = 0.25


def call(thought: str, name: str, **arguments: int) -> str:
    """Return a reply: the thought, if any, then one call."""
    written = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return f"{thought} [{name}({written})]".strip()


def carelessly(reply: str, rng: Random) -> str:
    """Return ``reply``, or its call without the names of its arguments."""
    return reply.replace("n=", "") if rng.random() < _GARBLED else reply


class ToolFamily(Family):
    """A family whose programs are tool environments: the size and the spare turns make the level.

    ``bands[level]`` are the sizes of a level, ``reserved`` the withheld ones among levels 1-3; those beyond
    are all withheld.
    """

    tools: ClassVar[bool] = True
    seed_levels: ClassVar[tuple[int, ...]] = (1, 2, 3)
    usual: ClassVar[int] = 4
    size: ClassVar[str]
    bands: ClassVar[Mapping[int, tuple[int, ...]]]
    reserved: ClassVar[frozenset[int]]

    def withheld(self, parameters: Parameters) -> bool:
        value = int(parameters[self.size])
        return value in self.reserved or value > max(self.bands[self.seed_levels[-1]])

    def band(self, value: int) -> int:
        """Return the lowest level whose sizes reach ``value``, at most 6."""
        return next((level for level in LEVELS if value <= max(self.bands[level])), LEVELS[-1])

    def pick(self, level: int, rng: Random, *, withheld: bool) -> int:
        """Return a size of ``level`` that is, or is not, withheld."""
        fitting = [size for size in self.bands[level] if self.withheld({self.size: size}) is withheld]
        if not fitting:
            raise ValueError(f"{self.name} has no {'withheld' if withheld else 'seed'} size at level {level}")
        return rng.choice(fitting)

    def tries(self, parameters: Parameters) -> int:
        return int(parameters["tries"])

    def level(self, parameters: Parameters) -> int:
        return min(6, max(1, self.band(int(parameters[self.size])) + self.usual - self.tries(parameters)))


class Knobs(ToolFamily):
    """Three tools look alike and one of them works: the hint tells which (Tool Selection)."""

    name = "knobs"
    skill = "Tool Selection"
    size = "spread"
    slots = ("tries", "base", "spread", "way")
    bands: ClassVar[Mapping[int, tuple[int, ...]]] = {
        1: (2, 3, 4),
        2: (2, 3, 4),
        3: (2, 3, 4),
        4: (5, 6),
        5: (7, 8),
        6: (9, 10),
    }
    reserved = frozenset({3})
    documents = (
        "The machine of the {noun} has three knobs that look alike. Only one of them is not stuck.",
        "One knob sets the {noun}, two are stuck. Turn it to what is asked, then to what is asked next.",
    )
    template = """
class Env(ToolEnv):
 max_turns=$tries
 def setup(self,rng):
  self.x=0;self.a=$base+rng.randint(0,9);self.b=self.a+rng.randint(1,$spread);return {}
 def turn(self,w,n):
  if w!="$way":raise ToolError("stuck")
  self.x=n;return "ok"
 def tool_blue(self,n:int):return self.turn("blue",n)
 def tool_red(self,n:int):return self.turn("red",n)
 def tool_tan(self,n:int):return self.turn("tan",n)
 def instructions(self):
  yield f"Set the $noun to {self.a}",lambda s:self.x==self.a
  yield f"Now to {self.b}",lambda s:self.x==self.b
 def plan(self):return [("$way",{"n":self.a}),("$way",{"n":self.b})]
"""

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        spread = self.pick(level, rng, withheld=withheld)
        tries = {1: 4, 2: 3, 3: 2}.get(level, 3)
        return {"tries": tries, "base": rng.randint(10, 70), "spread": spread, "way": rng.choice(_WAYS)}

    def level(self, parameters: Parameters) -> int:
        band = self.band(int(parameters[self.size]))
        return min(6, max(1, band + (4 if band == 1 else 3) - self.tries(parameters)))

    def fill(self, parameters: Parameters) -> Parameters:
        if str(parameters["way"]) not in _WAYS or int(parameters["spread"]) < 1:
            raise ValueError("a way is one of three, and the next number is another one")
        return parameters

    def hint(self, parameters: Parameters) -> str:
        return f"free: {parameters['way']}"

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        ways = [hint.split()[-1]] if hint else rng.sample(_WAYS, 3)
        thought, wanted = (str(hint) if hint else "try"), numbers(observation)[0]
        while True:
            observation = yield call(thought, ways[0], n=wanted)
            thought = "next" if "stuck" in observation else "again"
            ways = ways[1:] + ways[:1] if "stuck" in observation else ways
            wanted = next(iter(numbers(observation)), wanted)

    def blurt(self, observation: str, rng: Random) -> Script:
        wanted = numbers(observation)[0]
        while True:
            reply = call("", rng.choice(_WAYS), n=wanted + rng.choice((0, 0, 1)))
            observation = yield carelessly(reply, rng)


class Orders(ToolFamily):
    """The second tool needs the value that the first one returns, plus a number that the hint tells."""

    name = "orders"
    skill = "API Orchestration"
    size = "more"
    slots = ("tries", "base", "more")
    usual = 3
    bands: ClassVar[Mapping[int, tuple[int, ...]]] = {
        1: (1, 2),
        2: (3, 4),
        3: (5, 6, 7),
        4: (8,),
        5: (9,),
        6: (10, 11),
    }
    reserved = frozenset({2, 4, 6})
    documents = (
        "Somebody counts the {noun}, then as many are ordered and a few more. Who orders too few is told.",
        "An order of {noun} is their number and some spare ones. The count comes first.",
    )
    template = """
class Env(ToolEnv):
 max_turns=$tries
 def setup(self,rng):
  self.n=$base+rng.randint(0,9);self.seen=self.got=False;return {}
 def tool_count(self):
  self.seen=True;return f"{self.n} $noun"
 def tool_order(self,n:int):
  if n!=self.n+$more:raise ToolError("$more more")
  self.got=True;return "ok"
 def instructions(self):
  yield "Count the $noun",lambda s:self.seen
  yield "Order them and some more",lambda s:self.got
 def plan(self):return [("count",{}),("order",{"n":self.n+$more})]
"""

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        return {"tries": 3, "base": rng.randint(10, 70), "more": self.pick(level, rng, withheld=withheld)}

    def fill(self, parameters: Parameters) -> Parameters:
        if int(parameters["more"]) < 1:
            raise ValueError("an order has more")
        return parameters

    def hint(self, parameters: Parameters) -> str:
        return f"count, {parameters['more']} more"

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        observation = yield call("first", "count")
        now, more = numbers(observation)[0], numbers(hint)[0] if hint else 0
        while True:
            thought = count([(left, now + left) for left in range(1, more + 1)]) if more else "as many"
            observation = yield call(thought, "order", n=now + more)
            more = next(iter(numbers(observation)), more)

    def blurt(self, observation: str, rng: Random) -> Script:
        now = 0
        while True:
            reply = call("", "order", n=now + rng.randint(0, 9)) if now else call("", "count")
            observation = yield carelessly(reply, rng)
            now = now or next(iter(numbers(observation)), rng.randint(10, 70))


class Rooms(ToolFamily):
    """A call fails and says on which side to go on: the hint tells where to begin (Error Recovery).

    After three doors nothing opens: many calls in one turn do not replace thought.
    """

    name = "rooms"
    skill = "Error Recovery"
    size = "top"
    slots = ("top", "tries", "base", "end")
    bands: ClassVar[Mapping[int, tuple[int, ...]]] = {
        1: (6, 7, 8),
        2: (9, 10, 11),
        3: (12, 13, 14),
        4: (15, 16),
        5: (18, 20),
        6: (23, 26),
    }
    reserved = frozenset({7, 10, 13})
    documents = (
        "The {noun} are behind one of many doors. A wrong door tells whether they are further up or down.",
        "Open the door of the {noun}, then shut it again. Each wrong door is an error that helps.",
    )
    template = """
class Env(ToolEnv):
 max_turns=$tries
 def setup(self,rng):
  self.n=rng.randint($base,$end);self.x=-1;self.t=0;return {}
 def tool_open(self,n:int):
  d=n-self.n;self.t+=1
  if d or self.t>3:raise ToolError("over" if d>0 else "under")
  self.x=n;return "here"
 def tool_shut(self,n:int):
  if n==self.x:self.x=99
  return "ok"
 def instructions(self):
  yield "Open the $noun in 0..$top",lambda s:self.x==self.n
  yield "Shut it",lambda s:self.x==99
 def plan(self):return [("open",{"n":self.n}),("shut",{"n":self.n})]
"""

    def draw(self, level: int, rng: Random, *, withheld: bool) -> Parameters:
        top = self.pick(level, rng, withheld=withheld)
        width = rng.choice((2, 3))
        base = rng.randint(0, top - width)
        return {"top": top, "tries": 4, "base": base, "end": base + width}

    def fill(self, parameters: Parameters) -> Parameters:
        return within(parameters)

    def hint(self, parameters: Parameters) -> str:
        return f"{parameters['base']}..{parameters['end']}"

    def think(self, observation: str, hint: str | None, rng: Random) -> Script:
        low, high = numbers(hint or observation)[:2]
        while True:
            middle = (low + high) // 2
            observation = yield call(f"{low}..{high}", "open", n=middle)
            if "Error" not in observation:
                break
            low, high = (middle + 1, high) if "under" in observation else (low, middle - 1)
        while True:
            observation = yield call("found", "shut", n=middle)

    def blurt(self, observation: str, rng: Random) -> Script:
        top = numbers(observation)[1]
        name, n = "open", rng.randint(0, top)
        while True:
            observation = yield carelessly(call("", name, n=n), rng)
            name = "shut" if "here" in observation else name
            n = n if name == "shut" else rng.randint(0, top)
