"""The contract of an environment program, and the reading of its answers. Stdlib only: runs beside it.

A program defines a class whose name ends in ``Env`` with ``reset(seed) -> str | (str, dict)`` and
``step(action: str) -> (observation, reward, terminated, truncated, info)``; ``max_turns`` (attribute or
constructor argument), ``solution()`` and declared metadata are optional. Of several classes the last one
counts. Shapes are read tolerantly; what decides about money strictly: a reward is a finite number in
[-10, 10], the two flags are booleans, of Python or of numpy, and nothing that merely counts as one.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

MODULE = "environment"
FILENAME = "<environment>"
REWARD_BOUND = 10.0
FIVE = "observation, reward, terminated, truncated, info"
CALLABLE = ("reset", "step", "get_tools", "execute_tool", "render", "solution", "criteria_met", "messages")
MAX_METADATA = 4096

_words = str.split

# Importable modules: loaded before the files disappear, because nothing can be loaded after.
STDLIB = tuple(
    _words("""
    __future__ abc array base64 binascii bisect calendar cmath collections collections.abc colorsys
    contextlib copy dataclasses datetime decimal difflib enum fnmatch fractions functools graphlib hashlib
    heapq html io itertools json keyword locale logging math numbers operator os os.path pathlib pprint queue
    random re secrets shlex statistics string struct sys textwrap time types typing
    unicodedata uuid warnings weakref zlib
    """)
)

# Loaded too, because the modules above need them; programs may not import them by name.
HIDDEN = tuple(
    _words("""
    _strptime ast ctypes encodings.ascii encodings.cp1252 encodings.idna encodings.latin_1 encodings.punycode
    encodings.rot_13 encodings.utf_16 encodings.utf_16_be encodings.utf_16_le encodings.utf_32 gc inspect
    linecache mmap resource signal stringprep threading token tokenize traceback
    """)
)

# Names that a program may use without importing them.
INJECTED = tuple(
    _words("random math re string json copy itertools functools collections heapq bisect statistics")
)
INJECTED_TYPING = tuple(
    _words("Annotated Any Callable Dict Iterable List Literal Optional Sequence Set Tuple Union")
)


class ContractError(Exception):
    """The program's class or one of its answers is not what the contract asks for."""


def namespace(module: ModuleType, **more: Any) -> None:
    """Put the injected names, and ``more``, into ``module``."""
    names: dict[str, Any] = {name: sys.modules[name] for name in INJECTED if name in sys.modules}
    if "numpy" in sys.modules:
        names["numpy"] = names["np"] = sys.modules["numpy"]
    typing = sys.modules["typing"]
    module.__dict__.update(names, **more, **{name: getattr(typing, name) for name in INJECTED_TYPING})


def find_class(module: ModuleType) -> type:
    """Return the class defined in ``module`` whose name ends in ``Env``.

    Classes that it derives from are parts of it. Raises ContractError when there is none or more than one,
    or it lacks ``reset`` or ``step``.
    """
    found = [
        value
        for name, value in vars(module).items()
        if name.endswith("Env") and isinstance(value, type) and value.__module__ == module.__name__
    ]
    if not found:
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        own = [name for name in classes if vars(module)[name].__module__ == module.__name__]
        raise ContractError(
            "no class whose name ends in Env" + (f", only {', '.join(own[:5])}" if own else "")
        )
    games = {cls.__name__: cls for cls in found if not any(cls in other.__mro__[1:] for other in found)}
    if len(games) > 1:
        raise ContractError(f"which class is the game? {' and '.join(games)} end in Env; keep one")
    (chosen,) = games.values()
    for method in ("reset", "step"):
        if not callable(getattr(chosen, method, None)):
            raise ContractError(f"class {chosen.__name__} has no method {method}")
    return chosen


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``offered`` that ``function`` takes as keywords."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in offered.items() if name in named}


def construct(cls: type, kwargs: Mapping[str, Any]) -> Any:
    """Return ``cls`` called with the part of ``kwargs`` that it accepts.

    Its own default of ``max_turns`` is not raised.
    """
    if cls.__init__ is object.__init__:  # type: ignore[misc]
        return cls()
    taken = accepted(cls, kwargs)
    own = inspect.signature(cls).parameters.get("max_turns")
    if own is not None and type(own.default) is int and type(taken.get("max_turns")) is int:
        taken["max_turns"] = min(taken["max_turns"], own.default) if own.default > 0 else taken["max_turns"]
    return cls(**taken)


def takes_seed(reset: Callable[..., Any]) -> bool | None:
    """Return True when ``reset`` takes its seed by keyword, False by position, None when it takes none."""
    parameters = list(inspect.signature(reset).parameters.values())
    if any(
        p.kind is p.VAR_KEYWORD or (p.name == "seed" and p.kind is not p.VAR_POSITIONAL) for p in parameters
    ):
        return True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind in positional or p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    return None


def read_reset(answer: object) -> str:
    """Return the first observation. Raises ContractError unless it is text, or text and a dict."""
    observation, _ = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if not isinstance(observation, str):
        raise ContractError(f"reset must return text, not {type(observation).__name__}")
    return observation


def read_step(answer: object) -> tuple[str, float, bool, bool]:
    """Return the parts of a step without its info, which nobody sees.

    Raises ContractError, or what the parts' own methods raise.
    """
    if not isinstance(answer, tuple | list):
        raise ContractError(f"step must return a 5-tuple, not {type(answer).__name__}: {FIVE}")
    if len(answer) != 5:
        raise ContractError(f"step must return 5 values, not {len(answer)}: {FIVE}")
    observation, reward, terminated, truncated, _ = answer
    text = "" if observation is None else str(observation)
    ended, cut = exact_bool(terminated, "terminated"), exact_bool(truncated, "truncated")
    return text, read_reward(reward), ended, cut


def exact_bool(value: Any, what: str) -> bool:
    """Return a boolean of Python or of numpy; a value that merely counts as true is refused."""
    if isinstance(value, bool):
        return value
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.bool_):
        return bool(value)
    raise ContractError(f"{what} must be True or False, not {type(value).__name__}")


def read_reward(reward: Any) -> float:
    """Return a finite reward in [-10, 10]; text and None are refused, booleans and numpy scalars taken."""
    if reward is None or isinstance(reward, str | bytes | bytearray):
        raise ContractError(f"reward must be a number, not {type(reward).__name__}")
    value = float(reward)
    if not math.isfinite(value):
        raise ContractError(f"reward {value} is not finite")
    if abs(value) > REWARD_BOUND:
        raise ContractError(f"reward {value:g} is outside [-10, 10]")
    return value


def declaration(module: ModuleType, cls: type) -> dict[str, Any]:
    """Return the dict ``METADATA`` of the class or the module as ``{"fields": ...}``, {} when there is none.

    ``error`` takes the place of ``fields`` when it is not a dict of JSON values.
    """
    scope = next((scope for scope in (vars(cls), vars(module)) if "METADATA" in scope), None)
    if scope is None:
        return {}
    value = scope["METADATA"]
    if not isinstance(value, dict):
        return {"error": f"METADATA must be a dict, not {type(value).__name__}"}
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return {"error": f"METADATA must hold plain values only: {error}"}
    if len(text) > MAX_METADATA:
        return {"error": f"METADATA has {len(text)} characters, at most {MAX_METADATA} are taken"}
    return {"fields": json.loads(text)}


def budgeted(kwargs: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` with ``max_turns`` lowered to the declared budget, so that both can be kept."""
    made, budget = dict(kwargs), declared.get("fields", {}).get("max_turns")
    if type(budget) is int and budget > 0 and "max_turns" in made:
        made["max_turns"] = min(made["max_turns"], budget)
    return made
