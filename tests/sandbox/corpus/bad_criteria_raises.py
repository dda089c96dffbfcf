# rung: criteria
# reason: KeyError
class MailEnv(ToolEnv):
    def setup(self, rng):
        return {"to": rng.choice(["Ada", "Ben"]), "outbox": []}

    def tool_send(self, to: str, text: str) -> str:
        """Send a mail."""
        self.state["outbox"].append({"to": to, "text": text})
        return "sent"

    def instructions(self):
        to = self.state["to"]
        return [(f"Write to {to}.", lambda s: s["sent"][0]["to"] == to)]

    def plan(self):
        return [("send", {"to": self.state["to"], "text": "hello"})]
