"""Parts that several messages share: token segments, turns of a play, review results.

Arrays travel as raw little-endian bytes. A policy version on the wire is the packed integer of
``engine.lineage.Version``.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec


class Span(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Tokens ``[start, stop)`` of a segment were sampled by policy ``version``."""

    version: int
    start: int
    stop: int


class Segment(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A run of tokens that were really adjacent in the model's context.

    ``tokens`` holds the ids with ``width`` bytes each: uint16 (2) or int32 (4). ``spans`` are the tokens that
    were sampled, in order; ``logprobs`` float32 holds the behaviour policy's log-probs of these, one after
    the other. ``experts``, unless it is empty, holds those that each token but the last was routed to (layers
    x top-k, uint8, or uint16 for more than 256 experts).
    """

    tokens: bytes
    logprobs: bytes
    spans: tuple[Span, ...]
    width: Literal[2, 4] = 4
    experts: bytes = b""

    def __len__(self) -> int:
        """Return the number of tokens, sampled or not."""
        return len(self.tokens) // self.width

    @property
    def dtype(self) -> str:
        """The numpy type of ``tokens``."""
        return "<u2" if self.width == 2 else "<i4"

    @property
    def sampled(self) -> int:
        """The number of tokens that were sampled."""
        return sum(span.stop - span.start for span in self.spans)


def sample_id(owner: str, segments: tuple[Segment, ...]) -> str:
    """Return the id of what ``owner`` (an episode, an attempt at a design) sampled: it covers the content.

    A task that is done twice has two samples. The fact names the one that it is about, so credit never goes
    to tokens of the other.
    """
    digest = hashlib.blake2b(owner.encode(), digest_size=8)
    digest.update(msgspec.msgpack.encode(segments))
    return f"sample-{digest.hexdigest()}"


class Credit(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The credit of one sample: its ``advantage`` among the ``members`` of its ``group``.

    The advantage is normalised and scaled for its role. ``accepted``: the sample is a program that passed the
    validator.
    """

    sample: str
    role: Literal["agent", "designer"]
    group: str
    reward: float
    advantage: float
    members: int = 0
    accepted: bool = False


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One observation, the agent's reply to it, the action read from the reply and its reward, as text."""

    observation: str
    reply: str
    action: str
    reward: float


class ToolUse(msgspec.Struct, frozen=True, array_like=True):
    """Tools in a play: calls that could be read, turns whose calls could not, instructions done, and all."""

    calls: int = 0
    malformed: int = 0
    done: int = 0
    of: int = 0


EnvironmentState = Literal["fresh", "frontier", "mastered", "intractable", "degenerate"]
Flag = Literal["", "off_ticket", "incoherent"]


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The verdict on a program, as it is published. ``rung`` is the step that refused it, "" for none.

    ``trivial_win_rate`` is the best win rate of a policy that does not look. ``summary`` says what the game
    is about; ``near`` is the remembered program most like it, ``similarity`` their cosine. A design with a
    ``flag`` earns the floor, ``flag_reason`` says why.
    """

    rung: str = ""
    reason: str = ""
    title: str = ""
    summary: str = ""
    trivial_win_rate: float = 0.0
    degenerate: bool = False
    near: str = ""
    similarity: float | None = None
    flag: Flag = ""
    flag_reason: str = ""


class WaysToWin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a program's validation that its hint is checked against.

    ``firsts`` are first observations, ``alone`` the actions that win an instance at once (one entry per
    instance), ``plans`` longer solutions, ``actions`` those that the program took in ``instances`` plays.
    """

    firsts: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    plans: tuple[tuple[str, ...], ...] = ()
    actions: tuple[str, ...] = ()
    instances: int = 0


class EnvironmentStanding(msgspec.Struct, frozen=True, array_like=True):
    """The results of an environment while its window is open; fields as in ``EnvironmentScored``."""

    design: str
    environment: str
    state: EnvironmentState
    plays: int
    win: float
    win_low: float
    win_high: float
    hinted_plays: int = 0
    hinted: float | None = None
    regret: float | None = None
    turns: float | None = None
    noise_floor: float | None = None
    leak: bool = False
