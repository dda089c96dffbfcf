# rung: load
# reason: ToolEnv owns
class BoxEnv(ToolEnv):
    """Writes its own step, which is the base class's work."""

    def setup(self, rng):
        return {"open": False, "box": rng.randint(1, 9)}

    def tool_open(self) -> str:
        self.state["open"] = True
        return "open"

    def instructions(self):
        return [("Open the box.", lambda s: s["open"])]

    def plan(self):
        return [("open", {})]

    def step(self, action):
        return "you win", 1.0, True, False, {}
