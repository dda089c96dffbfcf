# rung: criteria
# reason: needs plan()
class FanEnv(ToolEnv):
    def setup(self, rng):
        return {"speed": 0, "want": rng.randint(1, 4)}

    def tool_fan(self, speed: int) -> str:
        """Set the fan."""
        self.state["speed"] = speed
        return "whirr"

    def instructions(self):
        want = self.state["want"]
        return [(f"Set the fan to {want}.", lambda s: s["speed"] == want)]
