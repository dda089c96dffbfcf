"""The designer's own rungs of the validator's ladder, and the verdict in the form in which it is published.

A design is *off ticket* when it declares or is the game of another skill, or when nothing in it comes from
its document (nano, where the seed families recognise their programs). It is *incoherent* when its text and
its code disagree (nano), or when most of it is of no use. A *duplicate* is all but the same as a known
program.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import anyio
import msgspec

from bus.messages import Finding, Flag
from roles.designer.dead_code import dead_share
from roles.designer.hint import Answers
from roles.designer.near_duplicates import Neighbours
from roles.work_loop import REASON_CHARACTERS
from sandbox import Rejected

if TYPE_CHECKING:
    from bus.messages import DesignTicket
    from engine.config import Config
    from roles.designer.corpus import Corpus
    from roles.designer.memory import Memory
    from sandbox import Check, Program, Verdict

_TITLE_CHARACTERS, _SUMMARY_CHARACTERS = 120, 300
# The part of the episodes that the checks of a hint need.
_ACTIONS, _PLANS, _ACTION_CHARACTERS = 512, 16, 200
_MOSTLY_DEAD = 0.5


class Commission(NamedTuple):
    """The ticket of a program, and the id of the document that it was written on ("" for none)."""

    ticket: DesignTicket
    document: str = ""


class Review:
    """Checks accepted programs as the recipe says (``designer.conformity``, ``designer.duplicates``)."""

    def __init__(self, config: Config, *, corpus: Corpus, memory: Memory) -> None:
        self._config, self._settings, self._corpus = config, config.designer, corpus
        self._neighbours = Neighbours(
            memory, method=self._settings.similarity, bound=self._settings.memory_duplicate
        )
        self._counts: Counter[str] = Counter()

    @property
    def checks(self) -> tuple[Check, ...]:
        """The rungs, in order. Each is given a program whose ``ticket`` is a Commission."""
        conforms = self._settings.conformity != "off" and self._settings.kind != "pool"
        return (*((self.conforms,) if conforms else ()), self.is_new)

    async def conforms(self, program: Program, verdict: Verdict) -> Verdict:
        """Flag or reject a program that does not belong to its ticket, or whose text and code disagree."""
        flag, reason = await self._finding(program, verdict)
        if not flag:
            return verdict
        self._counts[f"conformity_{flag}"] += 1
        if self._settings.conformity == "reject":
            raise Rejected(flag, reason)
        return msgspec.structs.replace(verdict, flag=flag, flag_reason=reason)

    async def is_new(self, program: Program, verdict: Verdict) -> Verdict:
        """Note the most similar known program; reject a near-duplicate where the recipe says so.

        An accepted program is known from now on, so its twin in flight finds it.
        """
        reject = self._settings.duplicates == "reject"
        near = await self._neighbours.claim(
            program.source,
            digest(program.source),
            design=program.ticket.ticket.design,
            unless_close=reject,
        )
        close = self._neighbours.close(near)
        self._counts["near_duplicates"] += close
        if close and reject:
            reason = f"as good as {near.environment[:12]}, similarity {near.similarity:.3f}"
            raise Rejected("duplicate", reason)
        similarity = near.similarity if near.environment else None
        return msgspec.structs.replace(verdict, near=near.environment, similarity=similarity)

    def note(self, design: str, source: str) -> None:
        """Make a program known that this ticket had published before."""
        self._neighbours.note(source, digest(source), design=design)

    def release(self, design: str) -> None:
        """Forget the program of a ticket that failed."""
        self._neighbours.release(design)

    def statistics(self) -> dict[str, float]:
        """Return counts of near-duplicates and of flags."""
        return {name: count for name, count in self._counts.items() if count}

    async def _finding(self, program: Program, verdict: Verdict) -> tuple[Flag, str]:
        ticket: DesignTicket = program.ticket.ticket
        declared = verdict.metadata.skill if verdict.metadata else None
        others = {_plain(name) for name in self._settings.skills} - {_plain(ticket.skill)}
        if declared and _plain(declared) in others:
            reason = f"it declares the skill {declared!r}, the ticket asks for {ticket.skill!r}"
            return "off_ticket", reason
        if self._config.model.scale == "nano":
            found = await anyio.to_thread.run_sync(self._nano, program.source, program.ticket)
            if found[0]:
                return found
        share, names = dead_share(program.tree)
        if share > _MOSTLY_DEAD:
            return "incoherent", f"{share:.0%} of its lines are of no use, such as {', '.join(names[:3])}"
        return "", ""

    def _nano(self, source: str, commission: Commission) -> tuple[Flag, str]:
        """Return the finding of the seed families, which know their programs."""
        from engine.nano import seeds

        families, skill = self._config.warmstart.families, commission.ticket.skill
        text = self._corpus.get(commission.document).text if commission.document else ""
        family, coherent = seeds.recognise(source, families) or (None, True)
        if family is not None and _plain(family.skill) != _plain(skill):
            return "off_ticket", f"it is a game of {family.skill}, the ticket asks for {skill}"
        if text and not any(noun in source for noun in seeds.NOUNS if noun in text):
            return "off_ticket", "nothing in it comes from its document"
        if not coherent:
            return "incoherent", "its text and its code disagree, as on numbers or on the number of tries"
        return "", ""


def published(source: str, verdict: Verdict) -> Finding:
    """Return the verdict in the form in which it is published with a design.

    It is made once: a ticket that is delivered again repeats it, though memory may have grown since.
    """
    if not verdict.ok:
        return Finding(source=source, rung=verdict.rung, reason=verdict.reason[:REASON_CHARACTERS])
    alone, plans, actions = _wins(verdict)
    return Finding(
        source=source,
        title=title(next(iter(verdict.first_observations), "")),
        summary=summary(verdict),
        trivial_win_rate=verdict.trivial_win_rate,
        degenerate=verdict.degenerate,
        near=verdict.near,
        similarity=verdict.similarity,
        flag=verdict.flag,
        flag_reason=verdict.flag_reason[:REASON_CHARACTERS],
        firsts=tuple(verdict.first_observations),
        alone=alone,
        plans=plans[:_PLANS],
        actions=tuple(sorted(action for action in actions if len(action) <= _ACTION_CHARACTERS)[:_ACTIONS]),
        instances=len({episode.seed for episode in verdict.episodes}),
    )


def answers(found: Finding) -> Answers:
    """Return what a hint must not say."""
    return Answers(found.alone, found.plans, frozenset(found.actions), found.instances)


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


def _wins(verdict: Verdict) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], set[str]]:
    """Return the known ways to win and the actions that the program took.

    They are the actions that win an instance at once (one per instance), the longer solutions, all actions.
    """
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
    return tuple(alone.values()), tuple(plans), actions


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())
