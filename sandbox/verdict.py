"""Settings and result of the validator."""

from __future__ import annotations

from typing import Literal

import msgspec

from sandbox.metadata import Metadata
from sandbox.probes import Transcript

_words = str.split
RUNGS = tuple(
    _words("""
    extract parse lint load metadata reset criteria step turns variation solution replay leak trivial
    off_ticket incoherent duplicate judge accepted
    """)
)

REASON_CHARACTERS = 400
"""Characters of a reason that are kept."""


class ValidatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the ladder.

    ``seeds`` instances are played by each policy; ``probe_steps`` bounds the steps of all policies together;
    ``coin_seeds`` bounds the instances on which a suspected coin is tossed, ``seconds`` the whole validation.
    ``garbage`` "tolerate" takes ValueError, TypeError, IndexError and KeyError on a meaningless action for
    an invalid action, "strict" rejects any exception. ``solution`` "check" plays a ``solution()`` that is
    there, "require" rejects programs without one. ``degenerate`` "reject" refuses programs that pay for form
    or for luck. ``salt`` and the program's text decide which instances are played; a run draws its salt when
    it begins.
    """

    seeds: int = 6
    replays: int = 2
    probe_steps: int = 900
    coin_seeds: int = 64
    seconds: float = 600.0
    garbage: Literal["tolerate", "strict"] = "tolerate"
    solution: Literal["require", "check"] = "check"
    degenerate: Literal["flag", "reject"] = "flag"
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
    ``ends`` tells whether the program ended an episode within the turns, ``solvable`` whether anything won,
    ``tools`` whether it is a tool environment with ``criteria`` instructions. ``episodes`` is everything that
    was played.

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
    solvable: bool = False
    tools: bool = False
    criteria: int = 0
    metadata: Metadata | None = None
    episodes: tuple[Episode, ...] = ()
    flag: Literal["", "off_ticket", "incoherent"] = ""
    flag_reason: str = ""
    near: str = ""
    similarity: float | None = None
