# rung: criteria
# reason: must be an integer
class AlarmEnv(ToolEnv):
    def setup(self, rng):
        return {"hour": rng.randint(5, 9), "alarm": None}

    def tool_set_alarm(self, hour: int) -> str:
        """Set the alarm."""
        self.state["alarm"] = hour
        return f"set to {hour}"

    def instructions(self):
        hour = self.state["hour"]
        return [(f"Wake me at {hour}.", lambda s: s["alarm"] == hour)]

    def plan(self):
        return [("set_alarm", {"hour": f"{self.state['hour']}:00"})]
