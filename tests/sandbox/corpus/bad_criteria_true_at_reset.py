# rung: criteria
# reason: criterion 1 is true already
class DoorEnv(ToolEnv):
    def setup(self, rng):
        return {"door": rng.choice(["open", "shut"]) and "open", "room": rng.randint(1, 9)}

    def tool_open(self, room: int) -> str:
        self.state["door"] = "open"
        return "open"

    def instructions(self):
        return [(f"Open the door of room {self.state['room']}.", lambda s: s["door"] == "open")]

    def plan(self):
        return [("open", {"room": self.state["room"]})]
