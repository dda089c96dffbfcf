"""Playing a program without a model: transcripts of episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from sandbox import actions
from sandbox.errors import EnvError, EnvFailure
from sandbox.frames import StepResult

if TYPE_CHECKING:
    from sandbox.instance import Instance

WIN, PAID = 0.5, 0.15


class Transcript(msgspec.Struct, frozen=True):
    """An episode from its first observation on.

    ``error`` is the exception that ended it, if one did, with its type and the phase it came from
    (``contract`` when the program's answer was at fault).
    """

    first: str
    actions: tuple[str, ...]
    steps: tuple[StepResult, ...]
    error: str = ""
    error_type: str = ""
    phase: str = ""

    @property
    def ended(self) -> bool:
        """Return whether the program itself ended the episode."""
        return bool(self.steps) and self.steps[-1].done

    @property
    def returned(self) -> float:
        """The pay of the episode: the last reward, clipped to [0, 1], if the program itself terminated it."""
        if not self.steps or self.error or not self.steps[-1].terminated:
            return 0.0
        return min(1.0, max(0.0, self.steps[-1].reward))

    @property
    def won(self) -> bool:
        """Return whether the episode pays at least half; a consolation for a wrong answer is no win."""
        return self.returned >= WIN

    def fingerprint(self) -> bytes:
        """Return bytes that are equal for transcripts that a player cannot tell apart."""
        return msgspec.json.encode((self.first, self.actions, self.steps, self.error_type, self.error))


async def play(instance: Instance, first: str, chosen: Iterator[str]) -> Transcript:
    """Step through ``chosen`` until the episode ends, the program raises, or they run out.

    Raises the terminal errors of the package.
    """
    taken: list[str] = []
    steps: list[StepResult] = []
    for action in chosen:
        taken.append(action)
        try:
            steps.append(await instance.step(action))
        except EnvError as error:
            return Transcript(first, tuple(taken), tuple(steps), str(error), error.type, error.phase)
        if steps[-1].done:
            break
    return Transcript(first, tuple(taken), tuple(steps))


def solution_actions(value: object) -> list[str]:
    """Return the actions that ``solution()`` means: a list's items, the boxed groups of a text, or the text.

    An item of a list may be empty, since an empty answer can be the right one. Raises EnvError when there are
    no actions.
    """
    if isinstance(value, list):
        found = [inner(str(item)) for item in value]
    else:
        text = "" if value is None else str(value).strip()
        found = actions.boxed(text) or ([text] if text else [])
    if not found:
        raise EnvError("ContractError", "it returned no action", phase="call")
    return found


def inner(text: str) -> str:
    """Return the content of the last boxed group, or the text itself."""
    return (actions.boxed(text) or [text])[-1].strip()


def tell(error: EnvFailure) -> str:
    """Return the error with the program's line where it is known."""
    if isinstance(error, EnvError) and error.traceback:
        return f"{error} ({error.traceback.splitlines()[-1][:160]})"
    return str(error)
