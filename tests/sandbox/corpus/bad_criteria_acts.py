# rung: criteria
# reason: must only look
class BellEnv(ToolEnv):
    """The criterion rings the bell itself."""

    def setup(self, rng):
        return {"bell": rng.choice(["small", "large"]), "rung": 0}

    def tool_ring(self, bell: Literal["small", "large"]) -> str:
        """Ring a bell."""
        self.state["rung"] += bell == self.state["bell"]
        return "ding"

    def instructions(self):
        def rung(state):
            state["rung"] += 1
            return state["rung"] > 1

        return [(f"Ring the {self.state['bell']} bell.", rung)]

    def plan(self):
        return [("ring", {"bell": self.state["bell"]})]
