"""Forty tool environments: twenty good ones, and twenty that are broken in one way each.

A broken one is a good one in which a piece is replaced.
"""

# ruff: noqa: E501
from __future__ import annotations

GOOD: dict[str, str] = {}

GOOD["till"] = '''
class TillEnv(ToolEnv):
    max_turns = 8
    intro = "You serve at the till of a fruit stall."

    def setup(self, rng):
        return {"want": rng.choice(["figs", "limes", "plums"]), "basket": [], "paid": None}

    def tool_add(self, item: str, count: int = 1) -> str:
        """Put an item into the basket."""
        if count < 1:
            raise ToolError("count must be at least 1")
        self.state["basket"] += [item] * count
        return "added"

    def tool_pay(self, method: Literal["cash", "card"]) -> str:
        """Take the payment."""
        self.state["paid"] = method
        return "paid"

    def instructions(self):
        want = self.state["want"]
        return [
            (f"Put two {want} into the basket.", lambda s: s["basket"].count(want) == 2),
            ("The customer pays by card.", lambda s: s["paid"] == "card"),
        ]

    def plan(self):
        return [("add", {"item": self.state["want"], "count": 2}), ("pay", {"method": "card"})]
'''

GOOD["tickets"] = '''
class TicketEnv(ToolEnv):
    max_turns = 10

    def setup(self, rng):
        owners = rng.sample(["Ada", "Bo", "Cy", "Di"], 3)
        return {"tickets": {n: {"owner": o, "open": True, "note": ""} for n, o in zip(rng.sample(range(100, 999), 3), owners)},
                "who": rng.choice(owners)}

    def tool_list(self) -> str:
        """List the tickets with their owners."""
        return ", ".join(f"{n}: {t['owner']}" for n, t in self.state["tickets"].items())

    def _get(self, number):
        if number not in self.state["tickets"]:
            raise ToolError("there is no such ticket")
        return self.state["tickets"][number]

    def tool_note(self, number: int, text: str) -> str:
        """Write a note on a ticket."""
        self._get(number)["note"] = text
        return "noted"

    def tool_close(self, number: int) -> str:
        """Close a ticket."""
        self._get(number)["open"] = False
        return "closed"

    def _mine(self):
        return next(n for n, t in self.state["tickets"].items() if t["owner"] == self.state["who"])

    def instructions(self):
        n = self._mine()
        return [
            (f"Leave a note on the ticket of {self.state['who']}, whatever you like.", lambda s: bool(s["tickets"][n]["note"])),
            ("Now close that ticket, and only that one.", lambda s: [k for k, t in s["tickets"].items() if not t["open"]] == [n]),
        ]

    def plan(self):
        return [("list", {}), ("note", {"number": self._mine(), "text": "called back"}), ("close", {"number": self._mine()})]
'''

GOOD["thermostat"] = '''
class ThermostatEnv(ToolEnv):
    max_turns = 9
    intro = "A house with two heaters."

    def setup(self, rng):
        return {"temp": rng.randint(10, 25), "mode": "off", "target": None}

    def tool_read(self) -> str:
        """Read the temperature."""
        return f"{self.state['temp']} degrees"

    def tool_mode(self, mode: Literal["heat", "cool", "off"]) -> str:
        """Set the mode."""
        self.state["mode"] = mode
        return f"mode {mode}"

    def tool_target(self, degrees: int) -> str:
        """Set the wanted temperature."""
        self.state["target"] = degrees
        return f"target {degrees}"

    def instructions(self):
        right = "heat" if self.state["temp"] < 18 else "cool"
        return [
            ("If it is below 18 degrees switch to heating, else to cooling.", lambda s: s["mode"] == right),
            ("Set the target two degrees above what it is now.", lambda s: s["target"] == s["temp"] + 2),
        ]

    def plan(self):
        s = self.state
        return [("read", {}), ("mode", {"mode": "heat" if s["temp"] < 18 else "cool"}), ("target", {"degrees": s["temp"] + 2})]
'''

GOOD["parcel"] = '''
class ParcelEnv(ToolEnv):
    max_turns = 8

    def setup(self, rng):
        return {"city": rng.choice(["Lund", "Graz", "Brno"]), "weight": rng.randint(1, 9), "sent": None}

    def tool_send(self, city: str, weight: int) -> str:
        """Send a parcel of so many kilograms."""
        self.state["sent"] = (city, weight)
        return "on its way"

    def instructions(self):
        s = self.state
        return [
            ("Please send my parcel.", REPLY),
            (f"Oh, of course: to {s['city']}, it weighs {s['weight']} kg.", lambda s: s["sent"] == (s["city"], s["weight"])),
        ]

    def plan(self):
        return ["Where to, and how heavy is it?", ("send", {"city": self.state["city"], "weight": self.state["weight"]})]
'''

GOOD["library"] = '''
class LibraryEnv(ToolEnv):
    max_turns = 8

    def setup(self, rng):
        return {"days": rng.randint(3, 20), "due": 10, "fine": 0}

    def tool_extend(self, days: int) -> str:
        """Extend the loan by so many days."""
        self.state["due"] += days
        return f"due in {self.state['due']} days"

    def tool_due(self) -> str:
        """Tell when the book is due."""
        return f"in {self.state['due']} days"

    def instructions(self):
        d = self.state["days"]
        return [
            (f"I need the book {d} days longer.", lambda s: s["due"] == 10 + d),
            ("And while you are at it, paint my fence green.", REPLY),
            ("Fair enough. Add one more day to the loan.", lambda s: s["due"] == 11 + d),
        ]

    def plan(self):
        return [("extend", {"days": self.state["days"]}), "I cannot do that.", ("extend", {"days": 1})]
'''

GOOD["bank"] = '''
class BankEnv(ToolEnv):
    max_turns = 10

    def setup(self, rng):
        return {"a": rng.randint(50, 99), "b": rng.randint(0, 9), "c": 0}

    def tool_balance(self, account: Literal["a", "b", "c"]) -> str:
        """Tell a balance."""
        return str(self.state[account])

    def tool_move(self, source: Literal["a", "b", "c"], to: Literal["a", "b", "c"], amount: int) -> str:
        """Move money."""
        if not 0 < amount <= self.state[source]:
            raise ToolError(f"{source} holds {self.state[source]}")
        self.state[source] -= amount
        self.state[to] += amount
        return "done"

    def instructions(self):
        total = self.state["a"]
        return [
            ("Move half of account a, rounded down, to account c.", lambda s: s["c"] == total // 2),
            ("Empty account b into c as well, if there is anything in it; else move 1 from a to c.",
             lambda s: s["b"] == 0 and s["c"] > total // 2),
        ]

    def plan(self):
        s = self.state
        last = {"source": "b", "to": "c", "amount": s["b"]} if s["b"] else {"source": "a", "to": "c", "amount": 1}
        return [("balance", {"account": "a"}), ("move", {"source": "a", "to": "c", "amount": s["a"] // 2}),
                ("balance", {"account": "b"}), ("move", last)]
'''

GOOD["search"] = '''
class SearchEnv(ToolEnv):
    max_turns = 12

    def setup(self, rng):
        return {"room": rng.randint(0, 40), "found": False, "locked": None}

    def tool_open(self, room: int) -> str:
        """Open a room."""
        if room != self.state["room"]:
            raise ToolError("further on" if room < self.state["room"] else "further back")
        self.state["found"] = True
        return "here it is"

    def tool_lock(self, room: int) -> str:
        """Lock a room."""
        self.state["locked"] = room
        return "locked"

    def instructions(self):
        return [
            ("The cello is in one of the rooms 0 to 40. Open the right one.", lambda s: s["found"]),
            ("Good. Lock that room.", lambda s: s["locked"] == s["room"]),
        ]

    def plan(self):
        return [("open", {"room": self.state["room"]}), ("lock", {"room": self.state["room"]})]
'''

GOOD["recipe"] = '''
class RecipeEnv(ToolEnv):
    max_turns = 10
    schemas = {"cook": {"type": "object", "properties": {"dish": {"type": "object", "properties": {
        "name": {"type": "string"}, "grams": {"type": "object", "additionalProperties": {"type": "integer"}}},
        "required": ["name", "grams"]}}, "required": ["dish"]}}

    def setup(self, rng):
        return {"card": {"flour": rng.randint(1, 9) * 100, "milk": rng.randint(1, 9) * 50}, "cooked": None, "bell": False}

    def tool_card(self) -> str:
        """Read the recipe card for pancakes, in grams."""
        return json.dumps(self.state["card"])

    def tool_cook(self, dish: dict) -> str:
        """Cook a dish from an amount of each ingredient."""
        self.state["cooked"] = dish
        return "it smells good"

    def tool_ring(self) -> str:
        """Ring the bell."""
        self.state["bell"] = True
        return "ding"

    def _double(self):
        return {name: 2 * grams for name, grams in self.state["card"].items()}

    def instructions(self):
        want = {"name": "pancakes", "grams": self._double()}
        return [
            ("Cook pancakes, twice the amounts of the card.", lambda s: s["cooked"] == want),
            ("Call everybody to the table.", lambda s: s["bell"]),
        ]

    def plan(self):
        return [("card", {}), ("cook", {"dish": {"name": "pancakes", "grams": self._double()}}), ("ring", {})]
'''

GOOD["census"] = '''
class CensusEnv(ToolEnv):
    max_turns = 8

    def setup(self, rng):
        return {"people": [rng.randint(1, 60) for _ in range(3)], "seen": set()}

    def tool_count(self, house: int) -> str:
        """Count the people of house 1, 2 or 3."""
        if house not in (1, 2, 3):
            raise ToolError("the houses are 1, 2 and 3")
        self.state["seen"].add(house)
        return f"{self.state['people'][house - 1]} people"

    def answer(self):
        return sum(self.state["people"])

    def instructions(self):
        return [("Visit every house, then tell how many people live there together.", lambda s: len(s["seen"]) == 3)]

    def plan(self):
        return [[("count", {"house": 1}), ("count", {"house": 2})], ("count", {"house": 3})]
'''

GOOD["calendar"] = '''
class CalendarEnv(ToolEnv):
    max_turns = 9

    def setup(self, rng):
        return {"day": rng.randint(1, 28), "busy": rng.choice([9, 10, 11]), "booked": None, "told": ""}

    def tool_free(self, date: str) -> str:
        """Tell the busy hour of a date (YYYY-MM-DD)."""
        if not re.fullmatch(r"\\d{4}-\\d{2}-\\d{2}", date):
            raise ToolError("a date looks like 2031-05-04")
        return f"busy at {self.state['busy']}"

    def tool_book(self, date: str, hour: int) -> str:
        """Book an hour."""
        if hour == self.state["busy"]:
            raise ToolError("that hour is taken")
        self.state["booked"] = [date, hour]
        return "booked"

    def tool_tell(self, text: str) -> str:
        """Send a message to the team."""
        self.state["told"] = text
        return "sent"

    def _want(self):
        return [f"2031-05-{self.state['day']:02}", self.state["busy"] + 1]

    def instructions(self):
        return [
            (f"Book the hour after the busy one on {self.state['day']} May 2031.", lambda s: s["booked"] == self._want()),
            ("Let the team know.", lambda s: len(s["told"]) > 0),
        ]

    def plan(self):
        date, hour = self._want()
        return [("free", {"date": date}), ("book", {"date": date, "hour": hour}), ("tell", {"text": "See you there."})]
'''

GOOD["printer"] = '''
class PrinterEnv(ToolEnv):
    max_turns = 10

    def setup(self, rng):
        return {"tray": rng.choice(["upper", "lower"]), "loaded": "", "pages": 0}

    def tool_load(self, tray: Literal["upper", "lower"]) -> str:
        """Load paper into a tray."""
        if tray != self.state["tray"]:
            raise ToolError(f"the {tray} tray is jammed; use the other one")
        self.state["loaded"] = tray
        return "loaded"

    def tool_print(self, pages: int) -> str:
        """Print pages."""
        if not self.state["loaded"]:
            raise ToolError("no paper")
        self.state["pages"] = pages
        return "printed"

    def instructions(self):
        return [
            ("Load paper, whatever tray works.", lambda s: s["loaded"] != ""),
            ("Print seven pages.", lambda s: s["pages"] == 7),
        ]

    def plan(self):
        return [("load", {"tray": self.state["tray"]}), ("print", {"pages": 7})]
'''

GOOD["contacts"] = '''
class ContactEnv(ToolEnv):
    max_turns = 8

    def setup(self, rng):
        names = rng.sample(["Iva", "Jon", "Kai", "Lea"], 2)
        return {"phone": {n: f"{rng.randint(100, 999)}-{rng.randint(10, 99)}" for n in names}, "who": names[0], "dialled": "", "fav": ""}

    def tool_find(self, name: str) -> str:
        """Find a number."""
        if name not in self.state["phone"]:
            raise ToolError(f"known are {', '.join(sorted(self.state['phone']))}")
        return self.state["phone"][name]

    def tool_dial(self, number: str) -> str:
        """Dial a number."""
        self.state["dialled"] = number
        return "it rings"

    def tool_favourite(self, name: str) -> str:
        """Mark a contact."""
        self.tool_find(name)
        self.state["fav"] = name
        return "marked"

    def instructions(self):
        who = self.state["who"]
        return [
            (f"Call {who}.", lambda s: s["dialled"] == s["phone"][who]),
            (f"Mark {who} as a favourite.", lambda s: s["fav"] == who),
        ]

    def plan(self):
        who = self.state["who"]
        return [("find", {"name": who}), ("dial", {"number": self.state["phone"][who]}), ("favourite", {"name": who})]
'''

GOOD["garden"] = '''
class GardenEnv(ToolEnv):
    max_turns = 12

    def setup(self, rng):
        return {"beds": {name: rng.choice(["dry", "wet"]) for name in ("herbs", "beans", "roses")} | {"kale": "dry"}, "log": []}

    def tool_look(self, bed: Literal["herbs", "beans", "roses", "kale"]) -> str:
        """Look at a bed."""
        return self.state["beds"][bed]

    def tool_water(self, beds: list[str]) -> str:
        """Water some beds."""
        for bed in beds:
            if bed not in self.state["beds"]:
                raise ToolError(f"there is no bed {bed}")
        self.state["log"] += beds
        return "watered"

    def _dry(self):
        return [name for name, soil in self.state["beds"].items() if soil == "dry"]

    def instructions(self):
        dry = self._dry()
        return [("Water every bed that is dry, and no other.", lambda s: sorted(s["log"]) == sorted(dry))]

    def plan(self):
        return [[("look", {"bed": bed}) for bed in self.state["beds"]], ("water", {"beds": self._dry()})]
'''

GOOD["elevator"] = '''
class ElevatorEnv(ToolEnv):
    max_turns = 8

    def setup(self, rng):
        return {"floor": 0, "to": rng.randint(3, 12), "door": "shut", "people": rng.randint(1, 5)}

    def tool_go(self, floor: int) -> str:
        """Go to a floor."""
        self.state["floor"] = floor
        return f"floor {floor}"

    def tool_door(self, how: Literal["open", "shut"]) -> str:
        """Open or shut the door."""
        self.state["door"] = how
        return how

    def instructions(self):
        to = self.state["to"]
        return [
            (f"Go to floor {to}.", lambda s: s["floor"] == to),
            ("Let them out.", lambda s: s["door"] == "open" and s["floor"] == to),
            ("Shut the door and come back to the ground.", lambda s: s["door"] == "shut" and s["floor"] == 0),
        ]

    def plan(self):
        return [("go", {"floor": self.state["to"]}), ("door", {"how": "open"}), [("door", {"how": "shut"}), ("go", {"floor": 0})]]
'''

GOOD["shop"] = '''
class ShopEnv(ToolEnv):
    max_turns = 10

    def setup(self, rng):
        goods = {n: rng.randint(2, 30) for n in rng.sample(["lamp", "vase", "rug", "desk", "shelf"], 3)}
        return {"goods": goods, "cart": [], "coupon": f"{rng.choice('ABC')}{rng.randint(10, 99)}", "used": ""}

    def tool_prices(self) -> dict:
        """List the prices."""
        return self.state["goods"]

    def tool_coupons(self) -> str:
        """Show the coupon of today."""
        return self.state["coupon"]

    def tool_buy(self, article: str) -> str:
        """Put an article into the cart."""
        if article not in self.state["goods"]:
            raise ToolError("not on sale")
        self.state["cart"].append(article)
        return "in the cart"

    def tool_redeem(self, code: str) -> str:
        """Redeem a coupon."""
        self.state["used"] = code
        return "redeemed"

    def _cheap(self):
        return min(self.state["goods"], key=self.state["goods"].get)

    def instructions(self):
        low = min(self.state["goods"].values())
        return [
            ("Buy one of the cheapest articles.", lambda s: len(s["cart"]) == 1 and s["goods"][s["cart"][0]] == low),
            ("Use today's coupon.", lambda s: s["used"] == s["coupon"]),
        ]

    def plan(self):
        return [("prices", {}), ("buy", {"article": self._cheap()}), ("coupons", {}), ("redeem", {"code": self.state["coupon"]})]
'''

GOOD["ferry"] = '''
class FerryEnv(ToolEnv):
    max_turns = 10

    def setup(self, rng):
        return {"cars": rng.randint(0, 8), "room": 5, "crossed": 0, "night": rng.random() < 0.5, "flag": ""}

    def tool_look(self) -> str:
        """Look at the queue and the sky."""
        return f"{self.state['cars']} cars, {'night' if self.state['night'] else 'day'}"

    def tool_ferry(self, cars: int) -> str:
        """Take cars over."""
        if not 0 <= cars <= 5:
            raise ToolError("the ferry takes five cars at most")
        self.state["crossed"] += cars
        return "over"

    def tool_flag(self, colour: Literal["red", "white"]) -> str:
        """Hoist a flag."""
        self.state["flag"] = colour
        return "hoisted"

    def instructions(self):
        n = self.state["cars"]
        colour = "red" if self.state["night"] else "white"
        return [
            ("Hoist the red flag at night, the white one by day.", lambda s: s["flag"] == colour),
            ("Take all waiting cars over, and one more that comes late.", lambda s: s["crossed"] == n + 1),
        ]

    def plan(self):
        n = self.state["cars"] + 1
        return [("look", {}), ("flag", {"colour": "red" if self.state["night"] else "white"}),
                *[("ferry", {"cars": min(5, n - done)}) for done in range(0, n, 5)]]
'''

GOOD["radio"] = '''
class RadioEnv(ToolEnv):
    max_turns = 9

    def setup(self, rng):
        self.words = rng.sample(["heron", "otter", "lynx", "stoat", "raven"], 2)
        return {"sign": self.words[0], "reply": "", "channel": 1, "wanted": rng.randint(2, 9)}

    def tool_listen(self) -> str:
        """Listen to the channel."""
        if self.state["channel"] != self.state["wanted"]:
            raise ToolError("only noise here")
        return f"they call themselves {self.words[0]}"

    def tool_tune(self, channel: int) -> str:
        """Tune to a channel, 1 to 9."""
        self.state["channel"] = channel
        return f"channel {channel}"

    def tool_answer(self, sign: str) -> str:
        """Answer a call sign."""
        self.state["reply"] = sign
        return "sent"

    def instructions(self):
        return [
            (f"Tune to channel {self.state['wanted']}.", lambda s: s["channel"] == s["wanted"]),
            ("Answer whoever is calling there.", lambda s: s["reply"] == s["sign"]),
        ]

    def plan(self):
        return [("tune", {"channel": self.state["wanted"]}), ("listen", {}), ("answer", {"sign": self.state["sign"]})]
'''

GOOD["museum"] = '''
class MuseumEnv(ToolEnv):
    max_turns = 8

    def setup(self, rng):
        return {"hall": rng.choice(["north", "south", "east"]), "guards": [], "lights": {"north": True, "south": True, "east": True}}

    def tool_where(self) -> str:
        """Tell which hall holds the statue."""
        return f"it is in the {self.state['hall']} hall"

    def tool_guard(self, hall: Literal["north", "south", "east"]) -> str:
        """Send the guard."""
        self.state["guards"].append(hall)
        return "on the way"

    def tool_lights(self, hall: Literal["north", "south", "east"], on: bool) -> str:
        """Switch the lights of a hall."""
        self.state["lights"][hall] = on
        return "on" if on else "off"

    def instructions(self):
        hall = self.state["hall"]
        return [
            ("Send the guard to the statue.", lambda s: s["guards"] == [hall]),
            ("Switch the lights off in the other two halls.", lambda s: s["lights"] == {h: h == hall for h in s["lights"]}),
        ]

    def plan(self):
        hall = self.state["hall"]
        return [("where", {}), ("guard", {"hall": hall}),
                [("lights", {"hall": h, "on": False}) for h in self.state["lights"] if h != hall]]
'''

GOOD["hotel"] = '''
class HotelEnv(ToolEnv):
    max_turns = 10
    intro = "The front desk of an inn."

    def setup(self, rng):
        return {"room": rng.randint(10, 40), "nights": rng.randint(2, 6), "stay": None, "breakfast": None}

    def tool_check_in(self, room: int, nights: int) -> str:
        """Check a guest in."""
        self.state["stay"] = {"room": room, "nights": nights}
        return "welcome"

    def tool_breakfast(self, room: int, kind: Literal["tea", "coffee"] = "tea") -> str:
        """Order breakfast."""
        self.state["breakfast"] = [room, kind]
        return "ordered"

    def instructions(self):
        r, n = self.state["room"], self.state["nights"]
        return [
            (f"Check me in for {n} nights.", REPLY),
            (f"Room {r}, please.", lambda s: s["stay"] == {"room": r, "nights": n}),
            ("I would like coffee at breakfast.", lambda s: s["breakfast"] == [r, "coffee"]),
            ("Can you also book me a flight?", REPLY),
        ]

    def plan(self):
        r, n = self.state["room"], self.state["nights"]
        return ["Which room?", ("check_in", {"room": r, "nights": n}), ("breakfast", {"room": r, "kind": "coffee"}), "We cannot."]
'''

GOOD["mixer"] = '''
class MixerEnv(ToolEnv):
    max_turns = 9

    def setup(self, rng):
        self.formula = {"base": rng.randint(1, 9), "dye": rng.randint(1, 9)}
        return {"can": {}, "stirred": 0.0, "label": ""}

    def tool_formula(self) -> dict:
        """Read the formula of the paint."""
        return self.formula

    def tool_pour(self, part: Literal["base", "dye"], litres: int) -> str:
        """Pour litres of a part into the can."""
        self.state["can"][part] = self.state["can"].get(part, 0) + litres
        return "poured"

    def tool_stir(self, minutes: float) -> str:
        """Stir."""
        self.state["stirred"] += minutes
        return "stirred"

    def instructions(self):
        return [
            ("Mix the paint by its formula.", lambda s: s["can"] == self.formula),
            ("Stir it for two and a half minutes.", lambda s: s["stirred"] == 2.5),
        ]

    def plan(self):
        pours = [("pour", {"part": part, "litres": n}) for part, n in self.formula.items()]
        return [("formula", {}), *pours, ("stir", {"minutes": 2.5})]
'''

# name: (the good one, what is replaced, by what)
_BREAKS: dict[str, tuple[str, str, str]] = {
    "unreachable: no tool writes it": ("till", 's["paid"] == "card"', 's["receipt"] == "card"'),
    "unreachable: more than a tool allows": ("elevator", 's["floor"] == to)', 's["floor"] == to + 0.5)'),
    "unreachable: contradiction": (
        "museum",
        's["guards"] == [hall])',
        's["guards"] == [hall] and not s["guards"])',
    ),
    "unreachable: out of order": (
        "printer",
        '("Load paper',
        '("Print.", lambda s: s["pages"] == 7 and not s["loaded"]), ("Load paper',
    ),
    "type: number as text": ("parcel", "(city, weight)\n", "(city, str(weight))\n"),
    "type: list and tuple": ("calendar", "= [date, hour]", "= (date, hour)"),
    "type: not a boolean": ("calendar", 'len(s["told"]) > 0', 's["told"]'),
    "type: text of a float": ("mixer", 's["stirred"] == 2.5', 's["stirred"] == "2.5"'),
    "underivable: a hidden word": (
        "radio",
        'return f"they call themselves {self.words[0]}"',
        'return "somebody is calling"',
    ),
    "underivable: a code that is never shown": ("till", 'Literal["cash", "card"]) -> str', "str) -> str"),
    "underivable: the coupon is not shown": ("shop", 'return self.state["coupon"]', 'return "there is one"'),
    "presatisfied: true at the start": (
        "elevator",
        '"floor": 0, "to": rng.randint(3, 12)',
        '"floor": 4, "to": 4, "n": rng.random()',
    ),
    "presatisfied: true before its turn": ("contacts", 's["fav"] == who', 's["dialled"] != ""'),
    "presatisfied: most of them": ("elevator", 's["door"] == "open" and s["floor"] == to', 's["floor"] != 0'),
    "never succeeds: raises always": (
        "mixer",
        'self.state["stirred"] += minutes\n',
        'raise ToolError("the mixer is broken")\n',
    ),
    "never succeeds: an argument of the wrong type": (
        "recipe",
        '"additionalProperties": {"type": "integer"}',
        '"additionalProperties": {"type": "string"}',
    ),
    "never succeeds: an error for what is right": (
        "bank",
        "if not 0 < amount <= self.state[source]",
        "if amount <= self.state[source]",
    ),
    "nondeterministic: a fresh value": (
        "shop",
        'return self.state["coupon"]\n',
        'self.state["coupon"] = str(id(object()))\n        return self.state["coupon"]\n',
    ),
    "nondeterministic: it grows from episode to episode": (
        "thermostat",
        'return {"temp": rng.randint(10, 25),',
        'type(self).n = getattr(type(self), "n", 0) + 1\n        return {"temp": rng.randint(10, 25) + type(self).n,',
    ),
    "nondeterministic: the criterion changes": (
        "garden",
        'sorted(s["log"]) == sorted(dry)',
        's["log"].append("x") or sorted(s["log"][:-1]) == sorted(dry)',
    ),
}


def _broken(name: str) -> str:
    good, old, new = _BREAKS[name]
    assert GOOD[good].count(old) >= 1, name
    return GOOD[good].replace(old, new)


BROKEN = {name: _broken(name) for name in _BREAKS}
BROKEN["underivable: a code that is never shown"] = (
    BROKEN["underivable: a code that is never shown"]
    .replace('"card"', '"sesame"')
    .replace("pays by card", "pays with the password")
)
