"""One rendering of every prompt, as it is kept in ``golden/NAME-VERSION.txt``.

``python tests/designer/prompt_cases.py`` writes the files of new versions and removes those of old ones.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import prompts


class Letters:
    """A chat format of one token a character."""

    stop_token_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        return False

    def first(self, content: str, system: str | None = None, tools: object = ()) -> list[int]:
        return self.encode(content)


GOLDEN = Path(__file__).with_name("golden")

VIEW: dict[str, Any] = {
    "polarity": "positive",
    "skill": "Logical Deduction",
    "win": 0.5,
    "regret": 0.25,
    "leak": False,
    "state": "frontier",
    "title": "Three doors",
    "summary": "",
    "why": "",
    "source": "class DoorsEnv: ...",
    "cut": False,
}
NEGATIVE = {
    **VIEW,
    "polarity": "negative",
    "title": "Two doors",
    "summary": "Find the open door of two.",
    "why": "Too easy: players won 97 % of 32 plays.",
    "state": "mastered",
    "win": 0.97,
    "source": "",
}

_DESIGN = {
    "skill": "Logical Deduction",
    "description": "drawing what must follow",
    "document": "A text on doors.",
    "target": 0.4,
    "memory": [VIEW, NEGATIVE],
    "max_turns": 25,
    "imports": ("math", "random"),
    "variant": "missing",
}
_VARIABLES: dict[str, dict[str, Any]] = {
    "design": _DESIGN,
    "hint": {"source": "class DoorsEnv: ..."},
    "judge": {"source": "class DoorsEnv: ..."},
    "play": {"observation": "Three doors.", "hint": "the left one"},
}


def variables(name: str, **changes: Any) -> dict[str, Any]:
    """Return what the prompt ``name`` is filled with."""
    return {**_VARIABLES[name.partition("_")[0]], **changes}


def render(name: str, **changes: Any) -> str:
    """Return the prompt ``name``, filled."""
    return prompts.render(name, **variables(name, **changes))


def golden(name: str) -> Path:
    """Return the file that holds the present version of ``name``."""
    return GOLDEN / f"{prompts.version(name).replace('/', '-')}.txt"


def write() -> None:
    """Write what is missing, remove what is no longer a version of anything; change nothing."""
    kept = {golden(name): name for name in prompts.names()}
    for path in GOLDEN.glob("*.txt"):
        if path not in kept:
            path.unlink()
    for path, name in kept.items():
        if not path.exists():
            path.write_text(render(name))
            print(path, file=sys.stderr)


if __name__ == "__main__":
    write()
