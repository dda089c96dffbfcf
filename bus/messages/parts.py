"""Parts that several messages share: token segments, turns of a play, review results.

Arrays travel as raw little-endian bytes: token ids int32, log-probs float32, masks uint8.
A policy version on the wire is the packed integer of ``engine.lineage.Version``.
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


class Segment(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A run of tokens that were really adjacent in the model's context.

    ``tokens`` int32 (T,), ``mask`` uint8 (T,) with 1 on sampled tokens, ``logprobs`` float32 (T,) of
    the behaviour policy, 0 where the mask is 0. ``spans`` cover exactly the masked positions.
    """

    tokens: bytes
    mask: bytes
    logprobs: bytes
    spans: tuple[Span, ...]


def sample_id(owner: str, segments: tuple[Segment, ...]) -> str:
    """Return the id of what ``owner`` (an episode, an attempt at a design) sampled: it covers the content.

    A task that is done twice has two samples. The fact names the one that it is about, so credit never goes
    to tokens of the other.
    """
    digest = hashlib.blake2b(owner.encode(), digest_size=12)
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


EnvironmentState = Literal["fresh", "frontier", "mastered", "intractable", "degenerate"]
Flag = Literal["", "off_ticket", "incoherent"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The review of a program. ``rung`` is the step that refused it, "" for none.

    ``firsts`` are first observations, ``alone`` the actions that win an instance at once, ``plans`` longer
    solutions, ``actions`` what the program was seen to take in ``instances`` plays; the other fields are as
    in ``EnvironmentReady``.
    """

    source: str
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
