"""The loop of an instance's process: read a request, run the program, answer. Stdlib only.

Frames are ``u32 little endian length | UTF-8 JSON`` on descriptor 3. Frame 0 of the child says that it is
confined; every later one answers exactly one request. The engine trusts nothing here: the program shares
this process and can change all of it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import itertools
import json
import linecache
import os
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from sandbox import contract, determinism, lint, tools

CHANNEL = 3
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
_decode = json.JSONDecoder().decode
_TRACEBACK_LINES = 12
_HELD_DEPTH, _HELD = 8, 20_000


class _Output(io.StringIO):
    """Text stream that keeps the first ``limit`` characters and drops the rest."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._left = limit

    def write(self, text: str, /) -> int:
        super().write(text[: self._left])
        self._left -= min(len(text), self._left)
        return len(text)


class _Fault(Exception):
    """An error of the program on its way to the engine."""

    def __init__(self, phase: str, kind: str, message: str, frames: str = "") -> None:
        super().__init__(message)
        # the engine refuses longer ones
        self.report = [kind[:100], message[:1000], frames[:2000], phase]


class Runner:
    """One instance; the lint lets a program import the modules ``importable``."""

    def __init__(self, importable: tuple[str, ...]) -> None:
        self.importable = importable
        self.env: Any = None
        self.owned: dict[str, Callable[..., Any]] = {}
        self.numpy = False
        self.takes_seed: bool | None = None
        self.limits: dict[str, int] = {}
        self.declared: dict[str, Any] = {}

    def serve(self) -> None:
        """Answer requests until the engine closes the channel."""
        sys.stdin = io.StringIO("")
        _write(_encode({"i": 0}).encode())
        while (request := _read()) is not None:
            self._send(self._answer(request))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.limits = request.get("limits", self.limits)
        output = sys.stdout = sys.stderr = _Output(self.limits["max_output_bytes"])
        reply: dict[str, Any] = {"i": request["i"]}
        operation: Callable[[dict[str, Any]], dict[str, Any]] = getattr(self, f"_{request['op']}")
        try:
            reply |= operation(request)
        except _Fault as fault:
            reply["err"] = fault.report
        with contextlib.suppress(ValueError):  # the program may have closed it
            reply["out"] = output.getvalue()
        return reply

    def _send(self, reply: dict[str, Any]) -> None:
        data = _encode(reply).encode("utf-8", "replace")
        if len(data) > self.limits["max_reply_bytes"]:
            # escapes can make a short text long
            reply |= {"o": reply.get("o", "")[: self.limits["max_reply_bytes"] // 16], "out": ""}
            data = _encode(reply).encode("utf-8", "replace")
        _write(data)

    def _lint(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check the source by the static rules without running it."""
        with _faults("parse"):
            tree = ast.parse(request["source"], contract.FILENAME)
        if finding := lint.lint(tree, self.importable):
            raise _Fault("lint", "Lint", finding)
        return {}

    def _load(self, request: dict[str, Any]) -> dict[str, Any]:
        source = request["source"]
        self.numpy = "np" in source or "numpy" in source
        # not by the seed: a constructor's draws must not tell the first episode of an object from a later one
        determinism.seed("load", numpy=self.numpy)
        cls = self._define(source)
        with _faults("init"):
            self.declared = contract.declaration(sys.modules[contract.MODULE], cls)
            self.env = contract.construct(cls, contract.budgeted(request["kwargs"], self.declared))
            self.owned = tools.keep(self.env) if isinstance(self.env, tools.ToolEnv) else {}
            self.takes_seed = contract.takes_seed(self._method("reset"))
        return self._reset(request) | {"m": self._about(cls)}

    def _define(self, source: str) -> type:
        with _faults("parse"):
            if "\0" in source:
                raise SyntaxError("source code cannot contain null bytes")
            code = compile(source, contract.FILENAME, "exec", dont_inherit=True)
        lines = source.splitlines(keepends=True)
        linecache.cache[contract.FILENAME] = (len(source), None, lines, contract.FILENAME)
        module = ModuleType(contract.MODULE)
        sys.modules[contract.MODULE] = module
        contract.namespace(module, ToolEnv=tools.ToolEnv, ToolError=tools.ToolError, REPLY=tools.REPLY)
        with _faults("load"):
            exec(code, module.__dict__)
            return contract.find_class(module)

    def _about(self, cls: type) -> dict[str, Any]:
        with _faults("init"):
            turns = getattr(self.env, "max_turns", None)
            known = type(turns) is int and 0 <= turns < 1 << 31
            return {
                "cls": cls.__name__[:128],
                "turns": turns if known else None,
                "calls": [name for name in contract.CALLABLE if callable(getattr(self.env, name, None))],
                "tools": isinstance(self.env, tools.ToolEnv),
                "meta": _encode(self.declared) if self.declared else "",
            }

    def _reset(self, request: dict[str, Any]) -> dict[str, Any]:
        seed = request["seed"]
        determinism.seed(seed, numpy=self.numpy)
        with _faults("reset"):
            reset = self._method("reset")
            if self.takes_seed is None:
                answer = reset()
            else:
                answer = reset(seed=seed) if self.takes_seed else reset(seed)
        with _faults("contract"):
            return self._text(contract.read_reset(answer))

    def _step(self, request: dict[str, Any]) -> dict[str, Any]:
        with _faults("step"):
            answer = self._method("step")(request["action"])
        with _faults("contract"):
            observation, reward, terminated, truncated = contract.read_step(answer)
            made = self._text(observation) | {"r": reward, "te": terminated, "tr": truncated}
            if isinstance(self.env, tools.ToolEnv):
                made["p"] = [answer[4][name] for name in ("done", "of")]
            return made

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        with _faults("call"):
            if request["name"] not in contract.CALLABLE:
                raise contract.ContractError(f"{request['name']} may not be called")
            value = self._method(request["name"])(*request["args"], **request["kwargs"])
            return self._text(json.dumps(value, ensure_ascii=False, default=str))

    def _state(self, request: dict[str, Any]) -> dict[str, Any]:
        with _faults("call"):
            # storing the seed makes no other game of it
            held = "\n".join(itertools.islice(_held(self.env, _HELD_DEPTH), _HELD))
            text = held.replace(str(request["seed"]), "seed")
            return {"o": hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()}

    def _method(self, name: str) -> Callable[..., Any]:
        """Return the method that the engine calls ``name``: of a tool environment the base class's own."""
        method: Callable[..., Any] = self.owned.get(name) or getattr(self.env, name)
        return method

    def _text(self, text: str) -> dict[str, Any]:
        limit = self.limits["max_observation_bytes"]
        return {"o": text[:limit].encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")}


def _held(value: Any, depth: int) -> Iterator[str]:
    """Yield the plain values that an object holds; of others, as of random generators, the type's name."""
    kind = type(value)
    parts: Iterable[Any] = ()
    if kind is dict:
        parts = itertools.chain.from_iterable(value.items())
    elif kind in (list, tuple):
        parts = value
    elif kind in (set, frozenset) and all(type(part) in (str, int, float) for part in value):
        # of other values the order depends on addresses
        parts = sorted(value, key=repr)
    elif kind.__module__ == "numpy" and hasattr(value, "tolist"):
        parts = (value.tolist(),)
    elif kind.__module__ == contract.MODULE and hasattr(value, "__dict__"):
        parts = (vars(value),)
    # integers of thousands of digits have no repr
    shown = kind in (str, float, bool) or (kind is int and value.bit_length() < 10_000)
    yield repr(value) if shown else kind.__name__
    if depth > 0:
        for part in parts:
            yield from _held(part, depth - 1)


@contextlib.contextmanager
def _faults(phase: str) -> Iterator[None]:
    """Turn any exception of the program into a fault of ``phase``."""
    try:
        yield
    except _Fault:
        raise
    except BaseException as error:
        raise _describe(phase, error) from None


def _describe(phase: str, error: BaseException) -> _Fault:
    """Return the fault of an error, whose own ``__str__`` may raise or lie."""
    if isinstance(error, MemoryError):
        return _Fault(phase, "MemoryError", "")
    kind = "ContractError" if isinstance(error, contract.ContractError) else type(error).__name__
    try:
        message = str(error)[:1000]
    except BaseException:
        message = "(the exception cannot be shown)"
    if phase == "parse" and isinstance(error, SyntaxError) and type(error.text) is str:
        message = f"{message}: {error.text.strip()[:120]}"
    try:
        stack = traceback.extract_tb(error.__traceback__)
        own = [f"line {f.lineno} in {f.name}: {f.line}" for f in stack if f.filename == contract.FILENAME]
        frames = "\n".join(own[-_TRACEBACK_LINES:])[:2000]
    except BaseException:
        frames = ""
    return _Fault(phase, kind, message, frames)


def _read() -> dict[str, Any] | None:
    header = _exactly(4)
    if header is None:
        return None
    body = _exactly(struct.unpack("<I", header)[0])
    if body is None:
        return None
    request: dict[str, Any] = _decode(body.decode("utf-8"))
    return request


def _exactly(size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = os.read(CHANNEL, size - len(data))
        if not part:
            return None
        data += part
    return data


def _write(data: bytes) -> None:
    view = memoryview(struct.pack("<I", len(data)) + data)
    while view:
        view = view[os.write(CHANNEL, view) :]
