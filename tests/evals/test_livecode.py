"""LiveCodeBench on records in its format, written here; programs run in the real sandbox."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from eval_scene import CONFIG, seat
from scenes.sandboxes import held_pool

from engine.evals import livecode
from sandbox import SandboxPool, SandboxSettings

STDIN_CASES = [
    {"input": "3\n1 2 3\n", "output": "6\n", "testtype": "stdin"},
    {"input": "2\n5 5\n", "output": "10", "testtype": "stdin"},
]
CALLS = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]


def packed(cases: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def record(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "question_title": name,
        "question_content": f"Problem {name}: add the numbers.",
        "question_id": name,
        "difficulty": "easy",
        "starter_code": "",
        "public_test_cases": json.dumps(STDIN_CASES[:1]),
        "private_test_cases": packed(STDIN_CASES[1:]),
        "metadata": "{}",
    } | fields


FUNCTION = {
    "starter_code": "class Solution:\n    def shift(self, values, by):\n        ",
    "public_test_cases": json.dumps(CALLS),
    "private_test_cases": packed(CALLS),
    "metadata": json.dumps({"func_name": "shift"}),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[SandboxPool]:
    settings = livecode.LiveCode("x").sandbox(SandboxSettings(zygotes=1))
    settings = msgspec.structs.replace(settings, cpu_call_seconds=1.0)  # of endless loops
    async with held_pool(settings) as pool:
        yield pool


async def grade(folder: Path, sandbox: SandboxPool, code: str, **fields: Any) -> tuple[float, str]:
    file = folder / "test6.jsonl"
    file.write_text(json.dumps(record("1", **fields)) + "\n")
    suite = livecode.live_code(str(folder), CONFIG)
    (item,) = suite.items(0, 0)
    asked = seat(f"Here it is.\n```python\n{code}\n```", sandbox=sandbox)
    outcome = await suite.play(item, asked)
    assert "6" not in asked.asked[0][0]
    return outcome.score, outcome.reason


@pytest.mark.parametrize(
    "code",
    [
        "input()\nprint(sum(map(int, input().split())))",
        "import sys\ndef main():\n    data = sys.stdin.buffer.read().split()\n"
        "    print(float(sum(map(int, data[1:]))))\nif __name__ == '__main__':\n    main()",
        "import sys\nn, *rest = sys.stdin.read().split()\nsys.stdout.write(str(sum(map(int, rest))))\nexit()",
        "from collections import deque\nimport numpy as np\ninput()\n"
        "print(int(np.sum(list(map(int, input().split())))))",
    ],
    ids=["input", "buffer", "read and exit", "imports"],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_right_programs_pass(tmp_path: Path, sandbox: SandboxPool, code: str) -> None:
    assert await grade(tmp_path, sandbox, code) == (1.0, "")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_function_is_called_with_its_arguments(tmp_path: Path, sandbox: SandboxPool) -> None:
    body = "class Solution:\n    def shift(self, a: List[int], by):\n        return [v + by for v in a]"
    assert await grade(tmp_path, sandbox, f"from typing import List\n{body}", **FUNCTION) == (1.0, "")
    wrong = await grade(
        tmp_path, sandbox, "class Solution:\n    def shift(self, v, by): return v", **FUNCTION
    )
    assert wrong == (0.0, "wrong answer")


HOSTILE = {
    "loop": ("while True: pass", "EnvTimeout"),
    "fork": ("import os\nwhile True: os.fork()", "PermissionError|Error|Violation"),
    "output": ("print('x' * (1 << 30))", "MemoryError"),
    "endless output": ("while True: print('x' * 10000)", "MemoryError"),
    "files": ("print(open('/etc/passwd').read())", "Error"),
    "exit": ("import os\nos._exit(0)", "EnvCrashed|Error"),
    "deep": ("def f(n): return f(n + 1)\nf(0)", "RecursionError|EnvCrashed"),
    "syntax": ("print(", "SyntaxError"),
    "frames": ("import sys\nprint(sys._getframe(1).f_locals)", "wrong answer|Error"),
}


@pytest.mark.parametrize(("code", "reason"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.asyncio(loop_scope="module")
async def test_hostile_programs_fail_alone(
    tmp_path: Path, sandbox: SandboxPool, code: str, reason: str
) -> None:
    score, why = await grade(tmp_path, sandbox, code)
    assert score == 0.0
    assert re.search(reason, why), why
    assert await grade(tmp_path, sandbox, "input()\nprint(sum(map(int, input().split())))") == (1.0, "")


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    hostile = base64.b64encode(zlib.compress(pickle.dumps(Payload(mark)))).decode()
    with pytest.raises(ValueError, match="only plain data is read"):
        livecode.read_cases(hostile)
    assert not mark.exists()
    assert livecode.read_cases(packed(STDIN_CASES)) == livecode.read_cases(json.dumps(STDIN_CASES))


@pytest.mark.parametrize("text", ["not base64!", base64.b64encode(b"no zlib").decode()])
def test_damaged_tests_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither JSON nor a packed pickle"):
        livecode.read_cases(text)


def test_tests_that_unpack_to_gigabytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livecode, "LARGEST_CASES", 1 << 20)
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        livecode.read_cases(base64.b64encode(zlib.compress(bytes(4 << 20))).decode())
