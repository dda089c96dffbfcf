# rung: accepted
# tools: yes
class LedgerEnv(ToolEnv):
    """Book a payment, then report a balance that only a tool shows."""

    max_turns = 6

    def setup(self, rng):
        people = rng.sample(["Ada", "Ben", "Cid", "Dot"], 3)
        return {"people": {name: rng.randint(20, 90) for name in people}, "from": people[0], "to": people[1],
                "sum": rng.randint(3, 15), "moved": False}

    def tool_balance(self, name: str) -> int:
        """Tell somebody's balance."""
        return self.state["people"][name]

    def tool_transfer(self, source: str, target: str, amount: int) -> str:
        """Move money."""
        people = self.state["people"]
        if amount > people[source]:
            raise ToolError("not enough money")
        people[source] -= amount
        people[target] += amount
        self.state["moved"] = (source, target, amount) == (self.state["from"], self.state["to"], self.state["sum"])
        return "done"

    schemas = {
        "transfer": {
            "type": "object",
            "properties": {
                "source": {"type": "string"},
                "target": {"type": "string"},
                "amount": {"type": "integer", "minimum": 1, "maximum": 100},
            },
            "required": ["source", "target", "amount"],
            "additionalProperties": False,
        }
    }

    def instructions(self):
        s = self.state
        text = f"Move {s['sum']} from {s['from']} to {s['to']}; then answer with {s['to']}'s new balance."
        return [(text, lambda state: state["moved"])]

    def answer(self):
        return self.state["people"][self.state["to"]] + self.state["sum"]

    def plan(self):
        s = self.state
        return [("transfer", {"source": s["from"], "target": s["to"], "amount": s["sum"]})]
