# rung: accepted
# degenerate: yes
# tools: yes
class BusyEnv(ToolEnv):
    """Any successful call at all fulfils the only criterion."""

    def setup(self, rng):
        return {"order": rng.randint(100, 999), "calls": 0}

    def tool_look_up(self, order: int) -> str:
        """Look an order up."""
        self.state["calls"] += 1
        return f"order {order} is on its way"

    def tool_cancel(self, order: int, reason: str = "") -> str:
        """Cancel an order."""
        self.state["calls"] += 1
        return "cancelled"

    def instructions(self):
        return [(f"Cancel order {self.state['order']}.", lambda s: s["calls"] > 0)]

    def plan(self):
        return [("cancel", {"order": self.state["order"]})]
