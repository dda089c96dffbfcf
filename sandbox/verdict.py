"""Settings and result of the validator."""

from __future__ import annotations

from typing import Literal

import msgspec

from sandbox.metadata import Metadata
from sandbox.probes import Transcript

RUNGS = (
    "extract",
    "parse",
    "lint",
    "load",
    "metadata",
    "reset",
    "criteria",
    "step",
    "turns",
    "variation",
    "solution",
    "replay",
    "leak",
    "trivial",
    "off_ticket",
    "incoherent",
    "duplicate",
    "judge",
    "accepted",
)


class ValidatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the ladder.

    ``seeds`` instances are played by each policy; ``probe_steps`` bounds the steps of all policies together.
    ``garbage`` "tolerate" takes ValueError, TypeError, IndexError and KeyError on a meaningless action for
    an invalid action, "strict" rejects any exception. ``variation`` "flag" accepts programs whose seeds
    make no difference. ``solution`` "check" plays a ``solution()`` that is there, "require" rejects programs
    without one. ``metadata`` "tolerate" checks what is declared, "require" wants goal (or win),
    skill, difficulty and max_turns declared. ``require_end`` rejects programs that never end an episode by
    themselves. ``degenerate_rate`` is the win rate of a blind policy from which a program counts as
    degenerate; ``coin_seeds`` bounds the instances on which a suspected coin is tossed and ``coin_rate`` is
    the win rate that no blind action may surely exceed (see :mod:`sandbox.trivial_policies`). ``degenerate``
    "reject" refuses such programs. ``judge_seconds`` bounds the caller's judge, ``seconds`` everything before
    it. ``salt`` and the program's text decide which instances are played; a run draws its salt when it
    begins.
    """

    seeds: int = 6
    replays: int = 2
    probe_steps: int = 900
    max_observation: int = 8000
    garbage: Literal["tolerate", "strict"] = "tolerate"
    variation: Literal["require", "flag"] = "require"
    solution: Literal["require", "check", "ignore"] = "check"
    metadata: Literal["tolerate", "require", "ignore"] = "tolerate"
    require_end: bool = False
    degenerate: Literal["flag", "reject"] = "flag"
    degenerate_rate: float = 0.9
    coin_seeds: int = 64
    coin_rate: float = 0.25
    judge_seconds: float = 120.0
    seconds: float = 600.0
    salt: str = ""


class Episode(msgspec.Struct, frozen=True):
    """One episode of a policy of the ladder (or of ``solution``, ``garbage ...``) on one instance."""

    policy: str
    seed: int
    transcript: Transcript


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the ladder. ``rung`` is the one that the program failed, or ``accepted``.

    ``policies`` maps a policy to its win rate; ``trivial_win_rate`` is the best of the blind ones,
    ``trivial_interval`` its 95 % interval. ``degenerate`` tells that the program pays for form or for luck,
    ``hack`` in which way. ``sweep`` tries one plausible action after the other, which may be honest work.
    ``ends`` tells whether the program ended an episode within the turns, ``varies`` whether its seed made a
    difference, ``solvable`` whether anything won, ``tools`` whether it is a tool environment with
    ``criteria`` instructions. ``episodes`` is everything that was played.

    The checks of the caller fill in the rest: ``flag`` and ``flag_reason`` of a design that does not belong
    to its ticket, and the digest ``near`` of the most similar known program with its cosine ``similarity``.
    """

    ok: bool
    rung: str
    reason: str = ""
    trivial_win_rate: float = 0.0
    trivial_interval: tuple[float, float] = (0.0, 1.0)
    degenerate: bool = False
    hack: str = ""
    first_observations: tuple[str, ...] = ()
    max_turns: int | None = None
    class_name: str = ""
    policies: dict[str, float] = {}
    ends: bool = False
    varies: bool = False
    solvable: bool = False
    tools: bool = False
    criteria: int = 0
    metadata: Metadata | None = None
    episodes: tuple[Episode, ...] = ()
    flag: Literal["", "off_ticket", "incoherent"] = ""
    flag_reason: str = ""
    near: str = ""
    similarity: float | None = None
