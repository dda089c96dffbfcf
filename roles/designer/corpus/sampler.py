"""Samples the grounding document of a ticket's attempt, cut to a number of tokens.

The order of draws is arithmetic on their number, without state. Two hosts that answer tickets of one run, in
any order, before and after a restart, so draw the same documents for each design; and no document is drawn
twice before all others were drawn.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import ConfigError
from roles.designer.corpus.document import NO_DOCUMENT, Document, Encoder, cut
from roles.designer.corpus.sources import LoadedCorpus, load_for

if TYPE_CHECKING:
    from bus.messages import DesignTicket
    from engine.config import Config


_CYCLE = 1000


class Draw(NamedTuple):
    """The document at ``position``, drawn as number ``done + 1`` of pass ``epoch`` over all documents."""

    position: int
    epoch: int
    done: int


class EpochOrder:
    """Draws ``size`` documents without replacement within an epoch, one pass over them.

    Draws come in blocks of ``attempts`` for one design, of which often only the first is used. From one pass
    to the next the order moves on by one, so that over ``attempts`` passes nearly every document is the
    first of a block once; then the order is shuffled again. ``sharers`` designs of different skills take
    blocks side by side. A pass omits documents that would not fill a last block, so that a block lies in one
    pass and a design never gets the same document twice (rarely, where several sources are mixed).
    """

    def __init__(self, size: int, *, seed: str, attempts: int, sharers: int = 1) -> None:
        self.size, self._seed, self._passes = size, seed, max(attempts, 1)
        block = self._passes * sharers
        self.length = size - size % block if size >= block else size
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def draw(self, index: int) -> Draw:
        """Return draw number ``index`` >= 0."""
        epoch, done = divmod(index, self.length)
        order = self._order(epoch // self._passes)
        return Draw(order[(done + epoch % self._passes) % self.size], epoch, done)

    def _shuffled(self, number: int) -> list[int]:
        order = list(range(self.size))
        random.Random(f"{self._seed}/{number}").shuffle(order)
        return order


class Mixture:
    """Spreads draws over sources by weight: exact in every cycle of a thousand draws.

    Each source has a draw in every cycle, however small its weight.
    """

    def __init__(self, weights: Sequence[float], *, seed: str) -> None:
        places = [index for index, share in enumerate(_shares(weights)) for _ in range(share)]
        random.Random(seed).shuffle(places)
        self._places = places
        self._where = [[at for at, of in enumerate(places) if of == index] for index in range(len(weights))]

    def pick(self, draw: int) -> tuple[int, int]:
        """Return (source, how many earlier draws that source had)."""
        full, at = divmod(draw, len(self._places))
        source = self._places[at]
        mine = self._where[source]
        return source, full * len(mine) + bisect_left(mine, at)


def _shares(weights: Sequence[float]) -> list[int]:
    """Split a cycle by largest remainder, at least one for each weight."""
    if len(weights) == 1:
        return [1]
    total = sum(weights)
    exact = [weight / total * _CYCLE for weight in weights]
    shares = [max(1, int(value)) for value in exact]
    order = sorted(range(len(weights)), key=lambda index: (int(exact[index]) - exact[index], index))
    for index in order[: max(0, _CYCLE - sum(shares))]:
        shares[index] += 1
    shares[shares.index(max(shares))] -= max(0, sum(shares) - _CYCLE)
    return shares


@dataclass(eq=False)
class _Pool:
    """The documents of one source that a set of skills shares, and the progress through them."""

    documents: tuple[Document, ...]
    skills: tuple[str, ...]
    order: EpochOrder
    epoch: int = -1
    done: int = 0

    def draw(self, number: int, skill: str | None) -> Document:
        """Return draw ``number`` of ``skill`` (None: of all skills); sharing skills alternate."""
        if skill is not None:
            number = number * len(self.skills) + self.skills.index(skill)
        draw = self.order.draw(number)
        self.epoch, self.done = max((self.epoch, self.done), (draw.epoch, draw.done + 1))
        return self.documents[draw.position]


@dataclass(frozen=True)
class _SkillPools:
    """The pools of one skill, one per source with documents for it, and their shares of the draws."""

    pools: tuple[_Pool, ...]
    mixture: Mixture


class Corpus:
    """Draws documents by the place of a ticket in the plan: the same on every host and after a restart.

    Within an epoch, one pass over the documents of a skill, no document is drawn twice. A skill draws from
    the documents of that skill, else from those of no skill, else from all; a skill with a pattern in
    ``filters`` (a glob over ids) draws from the matching ones only. When all skills share all documents,
    tickets are counted over all skills, so that another list of skills changes no draw.
    Raises ConfigError when a filter leaves a skill without a document.
    """

    def __init__(
        self,
        library: LoadedCorpus,
        *,
        skills: Sequence[str],
        limit: int,
        tokens: Encoder,
        attempts: int = 1,
        seed: int = 0,
        filters: Mapping[str, str] | None = None,
    ) -> None:
        self._documents = {item.id: item for source in library.sources for item in source.documents}
        self._bad, self.named, self.revisions = library.bad, library.named, dict(library.revisions)
        self._limit, self._tokens, self._attempts = limit, tokens, max(attempts, 1)
        self._skills = tuple(skills)
        suited = {skill: _suited(library, skill, (filters or {}).get(skill, "")) for skill in skills}
        self._shared = len(set(map(_ids, suited.values()))) == 1
        self._pools_by_skill = _pools_by_skill(library, suited, f"{seed}", self._attempts, self._shared)
        self._used: set[str] = set()

    @classmethod
    def open(cls, config: Config, tokens: Encoder, pins: Mapping[str, str] | None = None) -> Corpus:
        """Read the corpus of a recipe; blocks on files and imports.

        ``pins`` are the revisions that sources had when the run began. Raises ConfigError.
        """
        designer = config.designer
        return cls(
            load_for(config, pins),
            skills=designer.skills,
            limit=designer.corpus_tokens,
            tokens=tokens,
            attempts=designer.attempts,
            seed=config.run.seed,
            filters={item.name: item.documents for item in designer.custom_skills if item.documents},
        )

    def __len__(self) -> int:
        return len(self._documents)

    def draw(self, ticket: DesignTicket, attempt: int) -> Document:
        """Return the document of one attempt at ``ticket``, before it is cut.

        NO_DOCUMENT without a corpus. Attempts beyond the recipe's number begin again with the first document.
        """
        if not self._documents:
            return NO_DOCUMENT
        skill = ticket.skill if ticket.skill in self._pools_by_skill else self._skills[0]
        turn = ticket.number if self._shared else ticket.turn
        mine = self._pools_by_skill[skill]
        source, number = mine.mixture.pick(turn * self._attempts + attempt % self._attempts)
        document = mine.pools[source].draw(number, None if self._shared else skill)
        self._used.add(document.id)
        return document

    def note_used(self, document: str) -> None:
        """Count a document that this role used before a restart, or that another host used."""
        if document in self._documents:
            self._used.add(document)

    def get(self, document: str) -> Document:
        """Return a document by id, cut to the limit; NO_DOCUMENT when it is not in the corpus."""
        return self.cut(self._documents.get(document, NO_DOCUMENT))

    def statistics(self) -> dict[str, float]:
        """Return gauges of the corpus.

        ``corpus_epoch`` is the furthest pass begun, from 1 on; ``corpus_left`` counts the documents that the
        present passes have not drawn yet, ``corpus_unused`` the documents never used.
        """
        if not self._documents:
            return {"documents": 0}
        pools = {id(pool): pool for mine in self._pools_by_skill.values() for pool in mine.pools}.values()
        return {
            "documents": len(self._documents),
            "corpus_bad": self._bad,
            "corpus_epoch": max((pool.epoch + 1 for pool in pools), default=0),
            "corpus_left": sum(pool.order.length - pool.done for pool in pools),
            "corpus_unused": len(self._documents) - len(self._used),
        }

    def cut(self, document: Document) -> Document:
        """Return a document with its text cut to the token limit; reads its file and counts tokens.

        Raises SpadeError when its file has changed.
        """
        return document._replace(text=cut(document.whole(), self._limit, self._tokens), stored=None)


# The documents of one skill, by the number of their source.
_Suited = dict[int, tuple[Document, ...]]


def _pools_by_skill(
    library: LoadedCorpus, suited: Mapping[str, _Suited], seed: str, attempts: int, shared: bool
) -> dict[str, _SkillPools]:
    """Return the pools of each skill; skills with the same documents share a pool."""
    pools: dict[tuple[str, ...], _Pool] = {}
    found = {}
    for skill, by_source in suited.items():
        mine = []
        for number, documents in by_source.items():
            ids = tuple(item.id for item in documents)
            if ids not in pools:
                sharers = tuple(other for other in suited if suited[other].get(number) == documents)
                name = hashlib.blake2b("\n".join(ids).encode(), digest_size=8).hexdigest()
                order = EpochOrder(
                    len(ids),
                    seed=f"{seed}/{name}",
                    attempts=attempts,
                    sharers=1 if shared else len(sharers),
                )
                pools[ids] = _Pool(documents, sharers, order)
            mine.append(pools[ids])
        weights = [library.sources[number].weight for number in by_source]
        if mine:
            found[skill] = _SkillPools(tuple(mine), Mixture(weights, seed=f"{seed}/mixture"))
    return found


def _ids(by_source: _Suited) -> tuple[tuple[int, str], ...]:
    return tuple((number, item.id) for number, documents in by_source.items() for item in documents)


def _suited(library: LoadedCorpus, skill: str, pattern: str) -> _Suited:
    chosen = {
        number: tuple(item for item in source.documents if fnmatchcase(item.id, pattern))
        if pattern
        else _of_skill(source.documents, skill)
        for number, source in enumerate(library.sources)
    }
    found = {number: documents for number, documents in chosen.items() if documents}
    if pattern and library.sources and not found:
        raise ConfigError(
            f"no document of the corpus matches {pattern!r}, which the skill {skill} asks for",
            where="designer.custom_skills",
            remedy="The pattern is a glob over document ids; an empty one takes all documents.",
        )
    return found


def _of_skill(documents: tuple[Document, ...], skill: str) -> tuple[Document, ...]:
    for wanted in (skill, ""):
        found = tuple(item for item in documents if item.skill == wanted)
        if found:
            return found
    return documents
