"""LiveCodeBench: programs that a model writes, run in the sandbox and judged outside of it.

The data is a file of yours or the Hub. Its private tests are a pickle: a restricted reader takes texts and
containers only, so a record can carry no code.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from engine.config import Config, SamplingConfig
from engine.evals.questions import Questions
from engine.evals.suite import Item, Outcome, Seat, paper_and_smoke
from sandbox import EnvFailure, SandboxSettings

CPU_SECONDS = 6.0
LARGEST_CASES = 256 << 20
"""Bytes of the unpacked tests of one problem."""
_OUTPUT = 8 << 20
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PROMPT = """You write a correct Python program that solves the problem below.

{question}

{form}
Put the whole program into one fence:
```python
# your program
```"""
_STDIN = "Read the input from standard input and write the answer to standard output."
_STARTER = "Complete this code, and keep its names:\n```python\n{starter}\n```"
_JUDGE = """
import ast, io, json, sys, traceback

MOST = {most}


class Output(io.StringIO):
    written = 0

    def write(self, text):
        self.written += len(text)
        if self.written > MOST:
            raise MemoryError("too much output")
        return super().write(text)


def run(code, given, function):
    sys.setrecursionlimit(10_000)
    space = {{"__name__": "__main__", "exit": sys.exit, "quit": sys.exit}}
    output, before = Output(), (sys.stdin, sys.stdout)
    sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode()), encoding="utf-8")
    sys.stdout = output
    try:
        try:
            exec(compile(code, "<answer>", "exec"), space)
            if function:
                holder = space["Solution"]() if "Solution" in space else None
                called = getattr(holder, function) if holder is not None else space[function]
                value = called(*[json.loads(line) for line in given.split("\\n") if line.strip()])
                return json.dumps(value)
        except SystemExit:
            pass
        return output.getvalue()
    finally:
        sys.stdin, sys.stdout = before


class JudgeEnv:
    def reset(self, seed):
        return "ready", {{}}

    def step(self, action):
        task = json.loads(action)
        try:
            text = run(task["code"], task["input"], task["function"])
            answer = {{"output": text[:MOST]}}
        except BaseException as error:
            answer = {{"error": "".join(traceback.format_exception_only(error))[-300:]}}
        return json.dumps(answer), 0.0, False, False, {{}}
"""


class Case(NamedTuple):
    """One test: the text of its input and of its expected output."""

    given: str
    expected: str


class _Plain(pickle.Unpickler):
    """Reads pickles of texts, numbers and containers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the record names {module}.{name}: only plain data is read")


def plain_pickle(data: bytes) -> Any:
    """Unpickle plain data. Raises ValueError for everything else."""
    try:
        return _Plain(io.BytesIO(data)).load()
    except Exception as error:  # a hostile pickle can raise anything
        raise ValueError(f"this is no pickle of plain data: {error}") from error


def read_cases(text: str) -> list[Case]:
    """Read tests: JSON, or base64 of zlib of a pickle of JSON. Raises ValueError."""
    try:
        found = json.loads(text)
    except ValueError:
        inflate = zlib.decompressobj()
        try:
            data = inflate.decompress(base64.b64decode(text, validate=True), LARGEST_CASES)
        except (ValueError, zlib.error) as error:
            raise ValueError(f"tests are neither JSON nor a packed pickle: {error}") from error
        if inflate.unconsumed_tail:
            raise ValueError(f"tests are larger than {LARGEST_CASES >> 20} MiB") from None
        found = plain_pickle(data)
        found = json.loads(found) if isinstance(found, str) else found
    return [Case(str(case["input"]), str(case["output"])) for case in found]


class LiveCode(Questions):
    """``livecodebench-v6``: all of a problem's tests have to pass; groups are the difficulties."""

    hub = ("livecodebench/code_generation_lite",)
    version = "LiveCodeBench v6"
    presets: ClassVar = paper_and_smoke(
        SamplingConfig(temperature=0.2, top_p=0.95, max_tokens=16384), smoke_tokens=512
    )

    def records(self) -> Iterator[Mapping[str, Any]]:
        if self.source != "hub":
            yield from super().records()
            return
        from huggingface_hub import snapshot_download

        # the data set is a script, which `datasets` no longer runs; its files are plain
        folder = snapshot_download(self.hub[0], repo_type="dataset", allow_patterns="test*.jsonl")
        yield from LiveCode(folder).records()

    def read(self, records: Iterator[Mapping[str, Any]]) -> Iterator[Item]:
        for record in records:
            details = record.get("metadata") or "{}"
            details = json.loads(details) if isinstance(details, str) else details
            # unpacked when it is played: all tests together are gigabytes
            tests = (record["public_test_cases"], record.get("private_test_cases") or "[]")
            question, starter = str(record["question_content"]), str(record.get("starter_code") or "")
            yield Item(
                name=str(record["question_id"]),
                group=str(record.get("difficulty") or "all"),
                text=question,
                data=(question, starter, details.get("func_name", ""), tests),
            )

    async def play(self, item: Item, seat: Seat) -> Outcome:
        question, starter, function, tests = item.data
        form = _STARTER.format(starter=starter) if starter else _STDIN
        reply = await seat.ask([_PROMPT.format(question=question, form=form)])
        fences = _FENCE.findall(reply.text)
        if not fences:
            reason = "reply cut at its length limit" if reply.cut else "no program in the reply"
            return Outcome(score=0.0, reason=reason)
        cases = [case for text in tests for case in await seat.work(read_cases, text, seconds=120.0)]
        passed, reason = await judge(seat, fences[-1], cases, function)
        return Outcome(
            score=float(passed == len(cases) > 0),
            reason=reason,
            detail={"passed": passed, "tests": len(cases)},
        )

    def guess(self, item: Item, messages: Sequence[str], rng: random.Random) -> str:
        return "```python\nprint(input())\n```"

    def sandbox(self, settings: SandboxSettings) -> SandboxSettings:
        return msgspec.structs.replace(
            settings,
            memory_mb=max(settings.memory_mb, 1024),
            cpu_call_seconds=max(settings.cpu_call_seconds, CPU_SECONDS),
            cpu_life_seconds=max(settings.cpu_life_seconds, 600),
            wall_call_seconds=max(settings.wall_call_seconds, 2 * CPU_SECONDS),
            wall_hard_seconds=max(settings.wall_hard_seconds, 60.0),
            max_action_bytes=max(settings.max_action_bytes, 64 << 20),
            max_observation_bytes=max(settings.max_observation_bytes, 2 * _OUTPUT),
            max_reply_bytes=max(settings.max_reply_bytes, 3 * _OUTPUT),
            strikes=0,
        )


async def judge(seat: Seat, code: str, cases: Sequence[Case], function: str) -> tuple[int, str]:
    """Run ``code`` on each case until one fails; return the number that passed and the reason of the end.

    Expected outputs never enter the sandbox.
    """
    try:
        async with await seat.sandbox.spawn(_JUDGE.format(most=_OUTPUT)) as instance:
            for number, case in enumerate(cases):
                task = {"code": code, "input": case.given, "function": function}
                result = await instance.step(json.dumps(task))
                answer = json.loads(result.observation)
                if "output" not in answer:
                    return number, str(answer.get("error", "no output"))
                if not same_output(str(answer["output"]), case.expected, exact=bool(function)):
                    return number, "wrong answer"
    except EnvFailure as error:
        return 0, f"{type(error).__name__}: {error}"[:300]
    return len(cases), ""


def same_output(given: str, expected: str, *, exact: bool) -> bool:
    """Compare outputs: values of a function as JSON, printed lines without white space at their ends.

    Words of a line may also be equal as numbers.
    """
    if exact:
        try:
            return bool(json.loads(given) == json.loads(expected))
        except ValueError:
            return False
    ours, theirs = ([line.split() for line in text.strip().splitlines()] for text in (given, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    try:
        return float(ours) == float(theirs)
    except ValueError:
        return False


def live_code(argument: str, config: Config) -> LiveCode:
    """Return ``livecodebench-v6:FILE`` (or a folder of JSONL files), or ``livecodebench-v6:hub``."""
    return LiveCode(argument)
