# rung: criteria
# reason: must be True or False
class NoteEnv(ToolEnv):
    def setup(self, rng):
        return {"word": rng.choice(["tea", "rice"]), "notes": []}

    def tool_note(self, text: str) -> str:
        """Write a note."""
        self.state["notes"].append(text)
        return "noted"

    def instructions(self):
        word = self.state["word"]
        return [(f"Note {word}.", lambda s: s["notes"] and word in s["notes"])]

    def plan(self):
        return [("note", {"text": self.state["word"]})]
