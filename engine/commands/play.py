"""Playing an environment by hand, from a terminal or a pipe: lines in, observations and rewards out."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from sandbox import Instance, SandboxSettings, StepResult

_TURNS = 25
_HELP = """  TEXT               an action, without \\boxed{}
  :reset [SEED]      another episode; default: the next seed
  :info              class, methods, seed, turn and reward so far
  :tools             the tools of a tool environment
  :call NAME {JSON}  call a tool
  :solution          the program's solution
  :help              this list
  :quit              end (also at the end of input)"""


class _Quit(Exception):
    pass


class ManualEpisode:
    """One player and one instance. ``say`` prints a line."""

    def __init__(self, instance: Instance, seed: int, say: Callable[[str], None]) -> None:
        self.instance, self.seed, self.say = instance, seed, say
        self.turn, self.over, self.total = 0, False, 0.0

    def opening(self) -> None:
        """Show the first observation."""
        self.say(f"--- episode with seed {self.seed}; :help for more ---")
        self.say(self.instance.first)
        self._printed()

    async def line(self, text: str) -> None:
        """Execute one line. Raises _Quit and the terminal errors of the sandbox."""
        from sandbox import EnvError

        try:
            if text.startswith(":"):
                await self._command(text[1:])
            elif self.over:
                self.say("(the episode has ended: :reset plays another one, :quit ends)")
            else:
                await self._act(text)
        except EnvError as error:
            self._printed()
            self.say(f"! {error}" + (f"\n! {error.traceback}" if error.traceback else ""))

    async def _act(self, text: str) -> None:
        result: StepResult = await self.instance.step(text)
        self.turn += 1
        self.total += result.reward
        self.say(result.observation)
        self._printed()
        ends = [
            word for word, on in (("terminated", result.terminated), ("truncated", result.truncated)) if on
        ]
        self.say(f"reward {result.reward:g}, turn {self.turn}" + (f", {' and '.join(ends)}" if ends else ""))
        budget = self.instance.max_turns
        if result.done:
            self.over = True
            self.say(f"--- end of the episode: {self.turn} turns, {self.total:g} in all ---")
        elif budget is not None and self.turn >= budget:
            self.say(f"(the program's {budget} turns are used up; a run would truncate here)")

    async def _command(self, text: str) -> None:
        name, _, rest = text.strip().partition(" ")
        rest = rest.strip()
        if name in ("quit", "q"):
            raise _Quit
        if name == "reset":
            await self._reset(rest)
        elif name == "info":
            self._info()
        elif name == "tools":
            await self._tools()
        elif name == "call":
            await self._call(rest)
        elif name == "solution":
            await self._value("solution")
        else:
            self.say(_HELP)

    async def _reset(self, rest: str) -> None:
        try:
            seed = int(rest) if rest else self.seed + 1
        except ValueError:
            self.say(f"! {rest!r} is not a seed")
            return
        first = await self.instance.reset(seed)
        self.seed, self.turn, self.over, self.total = seed, 0, False, 0.0
        self.say(f"--- episode with seed {seed} ---")
        self.say(first)
        self._printed()

    def _info(self) -> None:
        one = self.instance
        turns = "not given" if one.max_turns is None else one.max_turns
        self.say(f"class {one.class_name}, max_turns {turns}, methods {', '.join(one.calls)}")
        self.say(f"seed {self.seed}, turn {self.turn}, reward so far {self.total:g}")

    async def _tools(self) -> None:
        if "get_tools" not in self.instance.calls:
            self.say("(this environment has no tools)")
            return
        for tool in _tools(await self.instance.call("get_tools")):
            self.say(tool)

    async def _call(self, rest: str) -> None:
        name, _, text = rest.partition(" ")
        if not name or "execute_tool" not in self.instance.calls:
            self.say("(this environment has no tools)" if name else "! :call NAME {JSON object}")
            return
        try:
            arguments = json.loads(text or "{}")
        except ValueError as error:
            self.say(f"! arguments are a JSON object: {error}")
            return
        await self._value("execute_tool", name, arguments)

    async def _value(self, method: str, *arguments: Any) -> None:
        if method not in self.instance.calls:
            self.say(f"(this environment has no {method})")
            return
        value = await self.instance.call(method, *arguments)
        self.say(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1))
        self._printed()

    def _printed(self) -> None:
        for line in self.instance.output.splitlines():
            self.say(f"| {line}")


def _tools(listed: Any) -> Iterable[str]:
    """List the tools of a ``get_tools`` result: function objects, bare or wrapped, or names."""
    for entry in listed if isinstance(listed, list) else [listed]:
        function = entry.get("function", entry) if isinstance(entry, dict) else entry
        if not isinstance(function, dict):
            function = {"name": str(function)}
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties", parameters) if isinstance(parameters, dict) else {}
        text = f"  {function.get('name', '?')}({', '.join(map(str, properties))})"
        description = " ".join(str(function.get("description") or "").split())
        yield f"{text}: {description}" if description else text


async def play(source: str, seed: int, kwargs: dict[str, Any], settings: SandboxSettings) -> int:
    """Play ``source`` on standard input and output; return the exit status, 1 when the program failed.

    The constructor gets ``max_turns`` = 25 unless ``kwargs`` has another value, as in the validator. Raises
    the infrastructure errors of the sandbox.
    """
    import msgspec

    from sandbox import EnvFailure, SandboxPool

    # a person may think for a long time
    patient = msgspec.structs.replace(settings, zygotes=1, idle_seconds=86400.0)
    async with SandboxPool(patient) as pool:
        try:
            offered = {"max_turns": _TURNS} | kwargs
            instance = await pool.spawn(source, seed=seed, kwargs=offered)
        except EnvFailure as error:
            _complain("The program does not start", error)
            return 1
        async with instance:
            table = ManualEpisode(instance, seed, _say)
            table.opening()
            lines = _Lines()
            try:
                while (text := await lines.next()) is not None:
                    await table.line(text)
            except _Quit:
                return 0
            except EnvFailure as error:
                _complain("The program ended", error)
                return 1
    return 0


def _say(text: str) -> None:
    """Print text of a program, without control characters."""
    from engine.text import clean

    print(clean(text), flush=True)


def _complain(what: str, error: Exception) -> None:
    from engine.text import clean

    frames = getattr(error, "traceback", "")
    print(clean(f"{what}: {error}" + (f"\n{frames}" if frames else "")), file=sys.stderr, flush=True)


class _Lines:
    """Lines of standard input: a terminal, a pipe or a file."""

    def __init__(self) -> None:
        self.descriptor = sys.stdin.fileno()
        self.prompt = "> " if sys.stdin.isatty() else ""
        self.data, self.open = b"", True

    async def next(self) -> str | None:
        """Return the next line without its end, None at the end of input."""
        print(self.prompt, end="", flush=True)
        while self.open and b"\n" not in self.data:
            # not in a thread: a blocked thread would delay the exit after Ctrl-C
            with contextlib.suppress(PermissionError):  # a plain file cannot be polled, and need not be
                await anyio.wait_readable(self.descriptor)
            part = os.read(self.descriptor, 1 << 16)
            self.open = bool(part)
            self.data += part
        if not self.data:
            return None
        line, _, self.data = self.data.partition(b"\n")
        return line.decode("utf-8", "replace").rstrip("\r")
