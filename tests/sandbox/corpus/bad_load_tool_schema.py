# rung: load
# reason: oneOf
class GateEnv(ToolEnv):
    schemas = {"pass_gate": {"type": "object", "oneOf": [{"required": ["code"]}, {"required": ["card"]}]}}

    def setup(self, rng):
        return {"code": rng.randint(100, 999), "in": False}

    def tool_pass_gate(self, **how) -> str:
        self.state["in"] = how.get("code") == self.state["code"]
        return "clicked"

    def instructions(self):
        return [("Pass the gate.", lambda s: s["in"])]

    def plan(self):
        return [("pass_gate", {"code": self.state["code"]})]
