# rung: accepted
# tools: yes
from sandbox.tools import ToolEnv, ToolError


class FilesEnv(ToolEnv):
    max_turns = 10
    scoring = "share"

    def setup(self, rng):
        names = rng.sample(["notes", "draft", "todo", "plan", "log"], 3)
        return {"files": {f"{n}.txt": f"{rng.randint(100, 999)} words" for n in names}, "trash": []}

    def tool_list(self) -> list:
        """List the files."""
        return sorted(self.state["files"])

    def tool_read(self, name: str) -> str:
        """Read a file."""
        return self.state["files"][name]

    def tool_rename(self, old: str, new: str) -> str:
        """Give a file another name."""
        if new in self.state["files"]:
            raise ToolError(f"{new} exists already")
        self.state["files"][new] = self.state["files"].pop(old)
        return "renamed"

    def tool_delete(self, name: str) -> str:
        """Move a file to the trash."""
        self.state["files"].pop(name)
        self.state["trash"].append(name)
        return "deleted"

    def instructions(self):
        first, second, _ = sorted(self.state["files"])
        self.first, self.second = first, second
        return [
            (f"Rename {first} to archive.txt.", lambda s: "archive.txt" in s["files"]),
            (f"Delete {second}.", lambda s: second in s["trash"]),
        ]

    def plan(self):
        return [[("rename", {"old": self.first, "new": "archive.txt"}), ("delete", {"name": self.second})]]
