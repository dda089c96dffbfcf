"""A second look at a program that the ladder has accepted: does it belong to its ticket, does its text tell
the truth, is it new, and what must a hint not say.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio

from roles.designer.conformity import RIVALS, Finding, Grounds, Ticketed, examine
from roles.designer.near_duplicates import Near, Neighbours
from roles.designer.prober import Answers, Host, Seen, probe
from roles.work_loop import sampling_seed

if TYPE_CHECKING:
    from bus.messages import DesignTicket
    from engine.config import Config
    from roles.designer.corpus import Corpus
    from roles.designer.memory import Memory
    from sandbox import Verdict

_GROUNDS = 200


class Notes(NamedTuple):
    """What was found. ``rung`` is "" unless the recipe rejects the program for it."""

    finding: Finding = Finding()
    near: Near = Near()
    answers: Answers = Answers()
    rung: str = ""
    reason: str = ""


class Inspector:
    """Looks at accepted programs as the recipe says (``designer.conformity``, ``designer.duplicates``)."""

    def __init__(self, config: Config, *, host: Host, corpus: Corpus, memory: Memory) -> None:
        designer = config.designer
        self._settings, self._host, self._corpus = designer, host, corpus
        self._run_seed = config.run.seed
        self._grounds: Grounds | None = None
        self._near = Neighbours(memory, method=designer.similarity, bound=designer.memory_duplicate)
        self._family_skill = _skills_of_families(config)
        how = designer.grounding
        self._grounded = how == "on" or (how == "auto" and self._family_skill is not None)
        self._examines = designer.conformity != "off" and designer.kind != "pool"
        self._counts: Counter[str] = Counter()

    async def look(
        self, ticket: DesignTicket, source: str, verdict: Verdict, document: str, *, held: bool | None
    ) -> Notes:
        """Return the notes on ``source``, written for ``ticket`` on the document with this id.

        ``held`` says what an earlier life decided about it, None when this is the first: memory may have
        grown since, but the tokens are published as valid or not. Raises the sandbox's infra errors.
        """
        seed = sampling_seed(self._run_seed, ticket.design, "probe")
        seen = await probe(self._host, source, verdict, max_turns=self._settings.max_turns, seed=seed)
        finding = await self._examine(ticket, source, verdict, document, seen)
        self._counts[f"conformity_{finding.flag}"] += bool(finding.flag)
        self._counts["conformity_ungrounded"] += (finding.rivals or 0.0) > RIVALS
        if finding.flag and self._settings.conformity == "reject" and not held:
            return Notes(finding, Near(), seen.answers, finding.flag, finding.reason)
        if held is False:
            reason = "it was refused when it was first compared"
            return Notes(finding, Near(), seen.answers, "duplicate", reason)
        near, close = await self._compare(ticket, source, reject=not held)
        if close and self._settings.duplicates == "reject" and not held:
            reason = f"as good as {near.environment[:12]}, similarity {near.similarity:.3f}"
            return Notes(finding, near, seen.answers, "duplicate", reason)
        return Notes(finding, near, seen.answers)

    def note(self, design: str, source: str) -> None:
        """Make a program known that an earlier life of this ticket has accepted."""
        self._near.note(source, _digest(source), design=design)

    def release(self, design: str) -> None:
        """Forget the program of a ticket that came to nothing."""
        self._near.release(design)

    def statistics(self) -> dict[str, float]:
        """Counts of near-duplicates, of flags, and of programs that other documents suit as well."""
        return {name: count for name, count in self._counts.items() if count}

    async def _compare(self, ticket: DesignTicket, source: str, *, reject: bool) -> tuple[Near, bool]:
        """Return the nearest known program and whether it is all but the same; a program that is accepted is
        known from now on, so that its twin in flight finds it.
        """
        reject = reject and self._settings.duplicates == "reject"
        near = await self._near.claim(source, _digest(source), design=ticket.design, unless_close=reject)
        close = self._near.close(near)
        self._counts["near_duplicates"] += close
        return near, close

    async def _examine(
        self, ticket: DesignTicket, source: str, verdict: Verdict, document: str, seen: Seen
    ) -> Finding:
        if not self._examines:
            return Finding()
        text = (await anyio.to_thread.run_sync(self._corpus.get, document)).text if document else ""
        if text and self._grounds is None:
            self._grounds = await anyio.to_thread.run_sync(lambda: Grounds(self._corpus.sample(_GROUNDS)))
        ticketed = Ticketed(ticket.skill, text, self._family_skill, self._settings.skills, self._grounded)
        grounds = self._grounds or Grounds([])
        finding = await anyio.to_thread.run_sync(partial(examine, source, verdict, ticketed, grounds))
        if not finding.flag and seen.outside:
            return Finding(flag="incoherent", reason=seen.outside, rivals=finding.rivals)
        return finding


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _skills_of_families(config: Config) -> Callable[[str], str | None] | None:
    """Return what tells the skill of a program of a seed family, None where programs are of none."""
    if config.model.scale != "nano":
        return None
    from engine import seeds

    names = config.warmstart.families
    skills = {family.name: family.skill for family in seeds.families(names)}

    def skill_of(source: str) -> str | None:
        found = seeds.classify(source, names)
        return skills[found[0]] if found else None

    return skill_of
