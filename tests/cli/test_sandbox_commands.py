"""``spade sandbox``: protection of the host, playing by hand, validation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scenes.cli import Result, Spade, refused

from sandbox import ProtectionReport, SandboxPool, SandboxUnavailable, protection

LEVERS = """import random
class LeverEnv:
    max_turns = 4
    def reset(self, seed):
        self.t, self.k = 0, random.Random(seed).randint(0, 8)
        return f"levers 0..8, 4 tries, seed {seed}"
    def step(self, action):
        self.t += 1
        won = int(action) == self.k
        print("looking at", self.k)
        return "open" if won else "closed", float(won), won or self.t >= 4, False, {"t": self.t}
"""
PAYS = LEVERS.replace("won = int(action) == self.k", "won = True")
BROKEN = "class BrokenEnv:\n    def reset(self, seed):\n        return 1 / 0\n    def step(self, a): pass\n"
REPLY = (
    f"<think>\n```python\nclass NotThisEnv: pass\n```\n</think>\nHere it is:\n```python\n{LEVERS}```\nEnjoy."
)
TOOLS = """class ShopEnv:
    def __init__(self, price: int = 3):
        self.price = price
    def reset(self, seed):
        return f"buy for {self.price}"
    def step(self, action):
        return "done", 1.0, True, False, {}
    def get_tools(self):
        parameters = {"type": "object", "properties": {"item": {"type": "string"}}}
        function = {"name": "buy", "description": "Buy it.", "parameters": parameters}
        return [{"type": "function", "function": function}]
    def execute_tool(self, name, arguments):
        return f"{name} {arguments['item']}"
"""
SPINS = LEVERS.replace("self.t += 1", "while True: pass")


def written(name: str, text: str) -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def nano_with(line: str) -> Path:
    """The nano recipe with one more line in its table of the sandbox."""
    recipe = Path(__file__).parent.parent.parent / "configs" / "nano.toml"
    return written("recipe.toml", recipe.read_text().replace("[sandbox]\n", f"[sandbox]\n{line}\n"))


class TestDoctor:
    def test_says_what_it_found(self, spade: Spade) -> None:
        result = spade("sandbox", "doctor")
        assert result.returncode == 0
        for part in ("ok", "seccomp", "open a file", "denied:", "live instances, bounded by", "uid"):
            assert part in result.stdout

    def test_json(self, spade: Spade) -> None:
        result = spade("sandbox", "doctor", "--json")
        found = json.loads(result.stdout)
        assert result.returncode == 0
        assert found["ok"] is True
        assert found["holes"] == []
        assert found["canary"]["trace"] == "killed"
        assert found["max_live"] == min(found["bounds"].values())

    def test_a_host_without_a_filter_fails(self, spade: Spade, monkeypatch: pytest.MonkeyPatch) -> None:
        async def enter(pool: SandboxPool) -> SandboxPool:
            pool.report, pool.bounds = poor({"seccomp": "failed:ENOSYS"}), {"memory": 7}
            return pool

        async def leave(pool: SandboxPool, *_: object) -> None:
            return None

        monkeypatch.setattr(SandboxPool, "__aenter__", enter)
        monkeypatch.setattr(SandboxPool, "__aexit__", leave)
        result = spade("sandbox", "doctor")
        assert result.returncode == 1
        for part in ("the filter of system calls has holes", "fork open", "second wall: open", "CONFIG_SECC"):
            assert part in result.stdout
        assert json.loads(spade("sandbox", "doctor", "--json").stdout)["ok"] is False

    def test_a_host_without_any_sandbox(self, spade: Spade, monkeypatch: pytest.MonkeyPatch) -> None:
        async def enter(_: SandboxPool) -> SandboxPool:
            raise SandboxUnavailable("generated programs can be confined on Linux 5.3 or newer only")

        monkeypatch.setattr(SandboxPool, "__aenter__", enter)
        refused(spade("sandbox", "doctor"), "Linux 5.3", "until this is fixed", code=1)
        path = written("env.py", LEVERS)
        for command in (("run", path), ("validate", path)):
            refused(spade("sandbox", *command), "Linux 5.3", "spade sandbox doctor", code=1)
        refused(spade("bench", "sandbox"), "Linux 5.3", "spade sandbox doctor", code=1)

    def test_the_recipes_limits_apply(self, spade: Spade) -> None:
        found = json.loads(spade("sandbox", "doctor", "--json", "--recipe", nano_with("max_live = 7")).stdout)
        assert found["max_live"] == 7
        assert found["bounds"]["sandbox.max_live"] == 7
        refused(spade("sandbox", "doctor", "--recipe", nano_with("max_live = -1")), "sandbox.max_live")
        refused(spade("sandbox", "doctor", "--recipe", "none.toml"), "none.toml")


def poor(walls: dict[str, str]) -> ProtectionReport:
    """A host without a filter, where an instance sees files."""
    return ProtectionReport(
        walls=walls,
        canary={"open": "denied:EACCES"},
        bare={"open": "open"},
        kernel="Linux",
        uid_mode="shared",
        holes=("fork open",),
        missing=("second wall: open open",),
    )


class TestAdvice:
    @pytest.mark.parametrize(
        ("walls", "words"),
        [
            ({"landlock": "on", "user_ns": "n/a"}, []),
            ({"seccomp": "failed:ENOSYS"}, ["CONFIG_SECCOMP"]),
            ({"landlock": "failed:ENOSYS", "user_ns": "failed:EPERM"}, ["Landlock", "user namespaces"]),
            ({"mount_ns": "failed:EPERM", "own_uid": "on"}, ["CAP_SYS_ADMIN"]),
            ({"mount_ns": "on", "own_uid": "failed:E"}, ["CAP_SETUID"]),
        ],
    )
    def test_names_what_to_change(self, walls: dict[str, str], words: list[str]) -> None:
        advice = protection.advice(poor(walls))
        assert len(advice) == len(words)
        for word, line in zip(words, advice, strict=True):
            assert word in line


class TestRun:
    def play(self, spade: Spade, source: str, *lines: str, options: tuple[object, ...] = ()) -> Result:
        return spade("sandbox", "run", written("env.py", source), *options, stdin="\n".join(lines) + "\n")

    def test_an_episode(self, spade: Spade) -> None:
        lines = [str(k) for k in range(9)]
        result = self.play(spade, LEVERS, *lines[:3], ":info", ":reset 4", *lines, ":quit", "unread")
        assert result.returncode == 0, result.stderr
        shown = ("seed 0", "| looking at", "reward 0, turn 1", "max_turns 4", "turn 3", "seed 4", "end of")
        for part in (*shown, "the episode has ended"):
            assert part in result.stdout
        assert "unread" not in result.stdout

    def test_errors_of_the_program_are_shown_and_play_goes_on(self, spade: Spade) -> None:
        result = self.play(spade, LEVERS, "x", "1", options=("--seed", 5))
        assert result.returncode == 0
        for part in ("! ValueError", "line 9 in step", "seed 5", "reward"):
            assert part in result.stdout

    def test_tools_are_listed_and_called(self, spade: Spade) -> None:
        result = self.play(
            spade,
            TOOLS,
            *(":tools", ':call buy {"item": "tea"}', ":call buy {item}", ":call", ":solution", ":what"),
            options=("--kwargs", '{"price": 8}'),
        )
        assert result.returncode == 0
        for part in ("buy for 8", "buy(item): Buy it.", "buy tea", "a JSON object", "no solution", ":quit"):
            assert part in result.stdout
        assert "no tools" in self.play(spade, LEVERS, ":tools").stdout

    def test_limits_hold(self, spade: Spade) -> None:
        recipe = nano_with("cpu_call_seconds = 0.1")
        result = self.play(spade, SPINS, "1", "2", options=("--recipe", recipe))
        assert result.returncode == 1
        assert "The program ended" in result.stderr
        assert "CPU time" in result.stderr

    @pytest.mark.slow
    def test_a_reply_a_file_and_a_broken_program(self, spade: Spade) -> None:
        assert "levers" in self.play(spade, REPLY).stdout
        path = written("env.py", LEVERS)
        command = [sys.executable, "-m", "engine.cli", "sandbox", "run", str(path)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with written("lines", "0\n1").open() as file:
            got = subprocess.run(command, stdin=file, capture_output=True, text=True, env=environment)
        assert got.returncode == 0, got.stderr
        assert "turn 2" in got.stdout
        broken = self.play(spade, BROKEN)
        assert broken.returncode == 1
        assert "does not start: ZeroDivisionError" in broken.stderr

    @pytest.mark.parametrize("kwargs", ["{", "[1]", "nonsense"])
    def test_bad_arguments(self, spade: Spade, kwargs: str) -> None:
        refused(spade("sandbox", "run", written("env.py", LEVERS), "--kwargs", kwargs), "--kwargs")
        refused(spade("sandbox", "run", "absent.py"), "absent.py", "No such file")


class TestValidate:
    def test_a_good_one(self, spade: Spade) -> None:
        result = spade("sandbox", "validate", written("levers.py", LEVERS), "--max-turns", "4")
        assert result.returncode == 0, result.stdout
        for part in ("levers.py: accepted", "LeverEnv, max_turns 4", "wins", "random", "degenerate  no"):
            assert part in result.stdout

    def test_a_directory_and_the_input(self, spade: Spade) -> None:
        Path("programs").mkdir()
        written("programs/broken.py", BROKEN)
        result = spade("sandbox", "validate", "programs", "-", stdin="no program")
        assert result.returncode == 1
        for part in ("programs/broken.py: rejected at rung", "-: rejected at rung", "0 of 2 accepted"):
            assert part in result.stdout

    @pytest.mark.slow
    def test_several_in_json(self, spade: Spade) -> None:
        files = {"a.py": LEVERS, "b.txt": REPLY, "c.py": BROKEN, "d.py": ""}
        paths = [written(name, text) for name, text in files.items()]
        result = spade("sandbox", "validate", *paths, "--json", "--max-turns", "4")
        rows: list[dict[str, Any]] = json.loads(result.stdout)
        assert result.returncode == 1
        assert [row["file"] for row in rows] == [*files]
        assert [row["ok"] for row in rows] == [True, True, False, False]
        assert [row["rung"] for row in rows] == ["accepted", "accepted", "reset", "extract"]
        assert "ZeroDivisionError" in rows[2]["reason"]

    @pytest.mark.slow
    def test_strict_refuses_what_pays_for_anything(self, spade: Spade) -> None:
        path = written("pays.py", PAYS)
        result = spade("sandbox", "validate", path)
        assert "degenerate  yes" in result.stdout
        assert result.returncode == 0
        strict = spade("sandbox", "validate", path, "--strict")
        assert strict.returncode == 1
        assert "rejected at rung trivial" in strict.stdout

    def test_unreadable_files(self, spade: Spade) -> None:
        refused(spade("sandbox", "validate", "absent.py"), "absent.py")
        Path("bytes.py").write_bytes(b"\xff\xfe\x00")
        refused(spade("sandbox", "validate", "bytes.py"), "UTF-8")


STEERS = """
class SteersEnv:
    def reset(self, seed):
        return "clipboard \\x1b]52;c;eA==\\x07 title \\x1b]0;owned\\x07 \\x9b2J back\\x08\\r"
    def step(self, action):
        print("\\x1b[2J printed")
        if action == "raise":
            raise ValueError("\\x1b[31m red")
        return "\\u202e turned", 0.0, action == "end", False, {}
    def get_tools(self):
        return [{"function": "\\x1b[1m"}, 7]
"""


@pytest.mark.slow
def test_a_program_cannot_steer_the_terminal(spade: Spade) -> None:
    file = written("steers.py", STEERS)
    played = spade("sandbox", "run", file, stdin="go\n:tools\nraise\nend\n")
    judged = spade("sandbox", "validate", file)
    for result in (played, judged):
        assert not set(result.stdout + result.stderr) & set("\x1b\x07\x08\x9b\r\u202e")
    assert "printed" in played.stdout
    assert "red" in played.stdout
    assert "title" in judged.stdout


@pytest.mark.slow
def test_what_validates_can_be_played(spade: Spade) -> None:
    """A constructor that wants its turns gets them, by hand as by the validator."""
    Path("env.py").write_text(
        LEVERS.replace("    max_turns = 4", "    def __init__(self, max_turns): self.max_turns = max_turns")
    )
    assert spade("sandbox", "validate", "env.py").returncode == 0
    played = spade("sandbox", "run", "env.py", stdin=":info\n")
    assert (played.returncode, played.stderr) == (0, "")
    assert "max_turns 25" in played.stdout
    three = spade("sandbox", "run", "env.py", "--kwargs", '{"max_turns": 3}', stdin=":info\n")
    assert "max_turns 3" in three.stdout
