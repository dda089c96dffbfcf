"""The designer's own rungs of the validator's ladder, and the verdict in the form in which it is published.

A design is *off ticket* when it declares or is the game of another skill, or when nothing in it comes from
its document (nano, where the seed families recognise their programs). It is *incoherent* when its text and
its code disagree (nano), or when most of it is of no use. A *duplicate* is all but the same as a known
program.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import anyio
import msgspec
import numpy as np

from bus.messages import Finding, Flag, WaysToWin
from engine.similarity import Embedder, Vectors, embedder, nearest
from roles.designer.dead_code import dead_share
from sandbox import REASON_CHARACTERS, Rejected
from sandbox.source import parse

if TYPE_CHECKING:
    from bus.messages import DesignTicket
    from engine.config import DesignerConfig
    from roles.designer.corpus import Corpus
    from roles.designer.memory import Memory
    from sandbox import Verdict

_TITLE_CHARACTERS, _SUMMARY_CHARACTERS = 120, 300
# The part of the episodes that the checks of a hint need.
_ACTIONS, _PLANS, _ACTION_CHARACTERS = 512, 16, 200
_MOSTLY_DEAD = 0.5
_CLAIMS = 4096


class Commission(NamedTuple):
    """The ticket of a program, and the id of the document that it was written on ("" for none)."""

    ticket: DesignTicket
    document: str = ""


class Review:
    """Checks accepted programs as the recipe says (``designer.conformity``, ``designer.duplicates``)."""

    def __init__(
        self,
        settings: DesignerConfig,
        *,
        corpus: Corpus,
        neighbours: Neighbours,
        families: Sequence[str] | None,
    ) -> None:
        """Make a review; ``families`` are the seed families that know their programs (nano), None without."""
        self._settings, self._corpus, self._families = settings, corpus, families
        self._neighbours = neighbours
        self._strict = settings.duplicates == "reject" and settings.kind != "pool"
        self._counts: Counter[str] = Counter()

    async def check(self, source: str, commission: Commission, verdict: Verdict) -> Verdict:
        """Return the verdict with its flag and the most similar known program.

        Raises Rejected for a flag or a near-duplicate where the recipe says so. An accepted program is known
        from now on, so its twin in flight finds it.
        """
        flag, flag_reason = await self._flag(source, commission, verdict)
        if flag:
            self._counts[f"conformity_{flag}"] += 1
            if self._settings.conformity == "reject":
                raise Rejected(flag, flag_reason)
        design = commission.ticket.design
        near = await self._neighbours.claim(source, design=design, unless_close=self._strict)
        close = self._neighbours.close(near)
        self._counts["near_duplicates"] += close
        if close and self._strict:
            raise Rejected("duplicate", _alike(near))
        similarity = near.similarity if near.environment else None
        return msgspec.structs.replace(
            verdict, flag=flag, flag_reason=flag_reason, near=near.environment, similarity=similarity
        )

    async def repeats(self, design: str, source: str) -> Finding | None:
        """Return the verdict on a program that is rejected before it is played: it repeats a known one."""
        near = await self._neighbours.nearest(source, design=design) if self._strict else Near()
        if not self._neighbours.close(near):
            return None
        self._counts["near_duplicates"] += 1
        return Finding(rung="duplicate", reason=_alike(near))

    def statistics(self) -> dict[str, float]:
        """Return counts of near-duplicates and of flags."""
        return {name: count for name, count in self._counts.items() if count}

    async def _flag(self, source: str, commission: Commission, verdict: Verdict) -> tuple[Flag, str]:
        """Return the flag of a program that does not conform to its ticket, and the reason; "" for none."""
        if self._settings.conformity == "off" or self._settings.kind == "pool":
            return "", ""
        ticket = commission.ticket
        declared = verdict.metadata.skill if verdict.metadata else None
        others = {_plain(name) for name in self._settings.skills} - {_plain(ticket.skill)}
        if declared and _plain(declared) in others:
            reason = f"it declares the skill {declared!r}, the ticket asks for {ticket.skill!r}"
            return "off_ticket", reason
        if self._families is not None:
            found = await anyio.to_thread.run_sync(self._nano, source, commission, self._families)
            if found[0]:
                return found
        tree = parse(source)
        share, names = dead_share(tree) if tree else (0.0, [])
        if share > _MOSTLY_DEAD:
            return "incoherent", f"{share:.0%} of its lines are of no use, such as {', '.join(names[:3])}"
        return "", ""

    def _nano(self, source: str, commission: Commission, families: Sequence[str]) -> tuple[Flag, str]:
        """Return the finding of the seed families, which know their programs."""
        from engine.nano import seeds

        skill = commission.ticket.skill
        text = self._corpus.get(commission.document).text if commission.document else ""
        family, coherent = seeds.recognise(source, families) or (None, True)
        if family is not None and _plain(family.skill) != _plain(skill):
            return "off_ticket", f"it is a game of {family.skill}, the ticket asks for {skill}"
        if text and not any(noun in source for noun in seeds.NOUNS if noun in text):
            return "off_ticket", "nothing in it comes from its document"
        if not coherent:
            return "incoherent", "its text and its code disagree, as on numbers or on the number of tries"
        return "", ""


def published(verdict: Verdict) -> Finding:
    """Return the verdict in the form in which it is published with a design.

    It is made once: a ticket that is delivered again repeats it, though memory may have grown since.
    """
    if not verdict.ok:
        return Finding(rung=verdict.rung, reason=verdict.reason)
    return Finding(
        title=title(next(iter(verdict.first_observations), "")),
        summary=summary(verdict),
        trivial_win_rate=verdict.trivial_win_rate,
        degenerate=verdict.degenerate,
        near=verdict.near,
        similarity=verdict.similarity,
        flag=verdict.flag,
        flag_reason=verdict.flag_reason[:REASON_CHARACTERS],
    )


def ways_to_win(verdict: Verdict) -> WaysToWin:
    """Return what a hint must not say."""
    alone: dict[int, str] = {}
    plans: dict[tuple[str, ...], None] = {}
    actions: set[str] = set()
    for episode in verdict.episodes:
        played = episode.transcript
        actions.update(played.actions[: len(played.steps)])
        if played.won and len(played.actions) == 1:
            alone.setdefault(episode.seed, played.actions[0])
        elif played.won and episode.policy == "solution":
            plans[played.actions] = None
    return WaysToWin(
        firsts=tuple(verdict.first_observations),
        alone=tuple(alone.values()),
        plans=tuple(plans)[:_PLANS],
        actions=tuple(sorted(action for action in actions if len(action) <= _ACTION_CHARACTERS)[:_ACTIONS]),
        instances=len({episode.seed for episode in verdict.episodes}),
    )


def summary(verdict: Verdict) -> str:
    """Return what a program declares of its idea and goal, for people and for the memory."""
    said = verdict.metadata
    parts = (said.title, said.idea, said.goal, said.win) if said else ()
    return "; ".join(" ".join(part.split()) for part in parts if part)[:_SUMMARY_CHARACTERS]


def title(observation: str) -> str:
    """Return the first line with text of an observation, for people."""
    lines = (line.strip() for line in observation.splitlines())
    return next((line for line in lines if line), "")[:_TITLE_CHARACTERS]


def digest(source: str) -> str:
    """Return the name of a program in the archive and in the facts."""
    return hashlib.sha256(source.encode()).hexdigest()


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


# --- near-duplicates ---------------------------------------------------------------------------------


class Near(NamedTuple):
    """The program most like the one asked about: its digest, "" for none, and their cosine."""

    environment: str = ""
    similarity: float = 0.0


def _alike(near: Near) -> str:
    return f"as good as {near.environment[:12]}, similarity {near.similarity:.3f}"


class Neighbours:
    """Vectors of the programs in ``memory``, made as they are asked for and dropped with the program.

    ``bound`` 0 takes the bound that suits the embedder. A program is known from its claim on, long before
    memory is told of it, so of two twins that are judged at the same time one finds the other; of two in
    different processes neither does. Raises ConfigError for a sentence model that is not there.
    """

    def __init__(self, memory: Memory, *, method: str = "auto", bound: float = 0.0) -> None:
        self._memory, self._method, self._bound = memory, method, bound
        self._embedder: Embedder | None = None
        self._vectors: dict[str, Vectors] = {}
        self._claims: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._lock = anyio.Lock()

    async def nearest(self, source: str, *, design: str) -> Near:
        """Return the nearest known program of another ticket."""
        async with self._lock:
            return await anyio.to_thread.run_sync(self._nearest, source, self._known(design))

    async def claim(self, source: str, *, design: str, unless_close: bool = False) -> Near:
        """Return the nearest known program of another ticket, and make this one known as ``design``'s.

        With ``unless_close`` it is not made known when the nearest is a near-duplicate.
        """
        async with self._lock:
            known = self._known(design)
            near = await anyio.to_thread.run_sync(self._nearest, source, known)
            if not (unless_close and self.close(near)):
                self.note(source, design=design)
            return near

    def note(self, source: str, *, design: str) -> None:
        """Make the program of ``design`` known without comparing it."""
        self._claims[design] = (digest(source), source)
        self._claims.move_to_end(design)
        while len(self._claims) > _CLAIMS:
            self._claims.popitem(last=False)

    def release(self, design: str) -> None:
        """Forget what a ticket claimed that came to nothing."""
        self._claims.pop(design, None)

    def close(self, near: Near) -> bool:
        """Return whether ``near`` makes a program a near-duplicate."""
        bound = self._bound or (self._embedder.near if self._embedder else 1.0)
        return bool(near.environment) and near.similarity >= bound

    def _known(self, design: str) -> dict[str, str]:
        """Return the programs to compare with, by digest; a claim lasts until memory has its design."""
        remembered = {record.design: record for record in self._memory.programs()}
        for told in self._claims.keys() & remembered.keys():
            del self._claims[told]
        known = {r.environment: r.source for r in remembered.values() if r.design != design}
        return known | dict(claim for other, claim in self._claims.items() if other != design)

    def _nearest(self, source: str, known: dict[str, str]) -> Near:
        if self._embedder is None:
            self._embedder = embedder(self._method)
        if not known:
            return Near()
        self._vectors = {name: row for name, row in self._vectors.items() if name in known}
        new = [name for name in known if name not in self._vectors]
        rows = self._embedder.embed([*(known[name] for name in new), source])
        # views would hold all the rows that they were made with
        self._vectors.update((name, row.copy()) for name, row in zip(new, rows, strict=False))
        places, cosines = nearest(rows[-1:], np.stack([self._vectors[name] for name in known]))
        return Near(list(known)[places[0, 0]], float(cosines[0, 0]))
