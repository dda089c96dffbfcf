# rung: criteria
# reason: criterion 2
class TripEnv(ToolEnv):
    """The second criterion compares a number with a text."""

    def setup(self, rng):
        return {"city": rng.choice(["Rome", "Oslo"]), "nights": rng.randint(2, 5), "booked": None, "paid": None}

    def tool_book(self, city: Literal["Rome", "Oslo"], nights: int) -> str:
        """Book a room."""
        self.state["booked"] = (city, nights)
        return "booked"

    def tool_pay(self, nights: int) -> str:
        """Pay the nights."""
        self.state["paid"] = nights
        return "paid"

    def instructions(self):
        city, nights = self.state["city"], self.state["nights"]
        return [
            (f"Book {nights} nights in {city}.", lambda s: s["booked"] == (city, nights)),
            ("Pay them.", lambda s: s["paid"] == str(nights)),
        ]

    def plan(self):
        nights = self.state["nights"]
        return [("book", {"city": self.state["city"], "nights": nights}), ("pay", {"nights": nights})]
