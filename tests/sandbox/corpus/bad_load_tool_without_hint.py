# rung: load
# reason: no type hint
class LampEnv(ToolEnv):
    def setup(self, rng):
        return {"lamp": rng.choice(["red", "blue"]), "on": False}

    def tool_switch(self, colour):
        """Switch a lamp on."""
        self.state["on"] = colour == self.state["lamp"]
        return "clicked"

    def instructions(self):
        return [(f"Switch the {self.state['lamp']} lamp on.", lambda s: s["on"])]

    def plan(self):
        return [("switch", {"colour": self.state["lamp"]})]
