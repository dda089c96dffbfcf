# rung: load
# reason: 0 methods tool_
class IdleEnv(ToolEnv):
    """Its tools are not called tool_...."""

    def setup(self, rng):
        return {"bell": rng.choice(["small", "large"]), "rung": False}

    def ring(self, bell: str) -> str:
        self.state["rung"] = True
        return "ding"

    def instructions(self):
        return [("Ring the bell.", lambda s: s["rung"])]

    def plan(self):
        return [("ring", {"bell": "small"})]
