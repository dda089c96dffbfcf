# rung: accepted
# tools: yes
class ShopEnv(ToolEnv):
    """Fill a basket and pay."""

    METADATA = {"goal": "Buy what is asked for", "skill": "State Modification", "difficulty": "easy", "max_turns": 8}
    max_turns = 8
    intro = "You run a small shop's till."

    def setup(self, rng):
        goods = rng.sample(["apples", "pears", "plums", "figs", "limes"], 3)
        stock = {name: rng.randint(4, 9) for name in goods}
        return {"stock": stock, "basket": {}, "paid": None, "want": goods[1], "count": rng.randint(2, 4)}

    def tool_stock(self) -> dict:
        """Show what is in stock."""
        return self.state["stock"]

    def tool_add(self, item: str, count: Annotated[int, "how many"] = 1) -> str:
        """Put an item into the basket."""
        if self.state["stock"][item] < count:
            raise ToolError(f"only {self.state['stock'][item]} {item} are left")
        self.state["stock"][item] -= count
        self.state["basket"][item] = self.state["basket"].get(item, 0) + count
        return f"{count} {item} added"

    def tool_pay(self, method: Literal["cash", "card"]) -> str:
        """Pay for the basket."""
        if not self.state["basket"]:
            raise ToolError("the basket is empty")
        self.state["paid"] = method
        return f"paid by {method}"

    def instructions(self):
        want, count = self.state["want"], self.state["count"]
        return [
            (f"Put {count} {want} into the basket.", lambda s: s["basket"].get(want) == count),
            ("The customer pays by card.", lambda s: s["paid"] == "card"),
        ]

    def plan(self):
        return [
            ("add", {"item": self.state["want"], "count": self.state["count"]}),
            ("pay", {"method": "card"}),
        ]
