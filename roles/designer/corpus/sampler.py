"""The face of a corpus to the designer: a ticket and an attempt in, a document cut to tokens out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from roles.designer.corpus.document import NO_DOCUMENT, Document, Tokens, cut
from roles.designer.corpus.draw_order import Deck, Mixture
from roles.designer.corpus.sources import Library, load_for

if TYPE_CHECKING:
    from bus.messages import DesignTicket
    from engine.config import Config


@dataclass(eq=False)
class _Pool:
    """The documents of one shelf that a set of skills shares, and how far they are dealt."""

    documents: tuple[Document, ...]
    skills: tuple[str, ...]
    deck: Deck
    epoch: int = -1
    done: int = 0

    def deal(self, draw: int, skill: str | None) -> Document:
        """Deal to draw number ``draw`` of ``skill``; the sharers take turns. None: of all skills."""
        if skill is not None:
            draw = draw * len(self.skills) + self.skills.index(skill)
        deal = self.deck.deal(draw)
        self.epoch, self.done = max((self.epoch, self.done), (deal.epoch, deal.done + 1))
        return self.documents[deal.position]


@dataclass(frozen=True)
class _Hand:
    """What one skill is dealt from: its pools, one a shelf that has something for it, and their shares."""

    pools: tuple[_Pool, ...]
    mixture: Mixture


class Corpus:
    """Deals documents by the place of a ticket in the plan: the same for every host and every life.

    Within an epoch, one pass over the documents that a skill may have, no document is dealt twice. Those of
    the ticket's skill come first, else those of no skill, else any; a skill with a pattern in ``filters`` (a
    glob over ids) gets what matches and nothing else. When all skills share all documents, tickets are
    counted over all skills, so that another list of skills changes no draw.
    Raises ConfigError when a filter leaves a skill without a document.
    """

    def __init__(
        self,
        library: Library,
        *,
        skills: Sequence[str],
        limit: int,
        tokens: Tokens,
        attempts: int = 1,
        seed: int = 0,
        filters: Mapping[str, str] | None = None,
    ) -> None:
        self._documents = {item.id: item for shelf in library.shelves for item in shelf.documents}
        self._bad, self.named, self.revisions = library.bad, library.named, dict(library.revisions)
        self._limit, self._tokens, self._attempts = limit, tokens, max(attempts, 1)
        self._skills = tuple(skills)
        suited = {skill: _suited(library, skill, (filters or {}).get(skill, "")) for skill in skills}
        self._shared = len(set(map(_ids, suited.values()))) == 1
        self._hands = _hands(library, suited, f"{seed}", self._attempts, self._shared)
        self._used: set[str] = set()
        self._dealt = 0

    @classmethod
    def open(cls, config: Config, tokens: Tokens, pins: Mapping[str, str] | None = None) -> Corpus:
        """Read the corpus of a recipe; blocks on files and imports. ``pins`` are the revisions that sources
        had when the run began. Raises ConfigError.
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
        """Return the document of one attempt at ``ticket``, cut to the token limit; NO_DOCUMENT without a
        corpus. Attempts beyond the recipe's number begin again with the first one's document.
        """
        return self.cut(self.deal(ticket, attempt))

    def deal(self, ticket: DesignTicket, attempt: int) -> Document:
        """Return what :meth:`draw` does, not cut yet: that may read a file and count many tokens."""
        if not self._documents:
            return NO_DOCUMENT
        skill = ticket.skill if ticket.skill in self._hands else self._skills[0]
        turn = ticket.number if self._shared else ticket.turn
        hand = self._hands[skill]
        source, draw = hand.mixture.pick(turn * self._attempts + attempt % self._attempts)
        document = hand.pools[source].deal(draw, None if self._shared else skill)
        self._dealt += 1
        self._used.add(document.id)
        return document

    def note_used(self, document: str) -> None:
        """Count a document that another life of this role, or another host, has used."""
        if document in self._documents:
            self._used.add(document)

    def get(self, document: str) -> Document:
        """Return a document by id, cut to the limit; NO_DOCUMENT when it is not in the corpus."""
        return self.cut(self._documents.get(document, NO_DOCUMENT))

    def sample(self, count: int) -> list[str]:
        """Return the texts of at most ``count`` documents, evenly spread over the corpus, uncut; may read
        files.
        """
        documents = list(self._documents.values())
        every = max(1, -(-len(documents) // max(count, 1)))
        return [document.whole() for document in documents[::every]]

    def statistics(self) -> dict[str, float]:
        """Gauges. ``corpus_epoch`` is the furthest pass begun, from 1 on; ``corpus_left`` counts what the
        present passes have not dealt yet, ``corpus_unused`` the documents never used.
        """
        if not self._documents:
            return {"documents": 0}
        pools = {id(pool): pool for hand in self._hands.values() for pool in hand.pools}.values()
        return {
            "documents": len(self._documents),
            "corpus_bad": self._bad,
            "corpus_dealt": self._dealt,
            "corpus_epoch": max((pool.epoch + 1 for pool in pools), default=0),
            "corpus_left": sum(pool.deck.length - pool.done for pool in pools),
            "corpus_unused": len(self._documents) - len(self._used),
        }

    def cut(self, document: Document) -> Document:
        """Return a document with its text, as much of it as a design gets. Raises SpadeError when it is not
        where it was.
        """
        return document._replace(text=cut(document.whole(), self._limit, self._tokens), stored=None)


# The documents that one skill may have, by the number of their shelf.
_Suited = dict[int, tuple[Document, ...]]


def _hands(
    library: Library, suited: Mapping[str, _Suited], seed: str, attempts: int, shared: bool
) -> dict[str, _Hand]:
    """Return the hand of each skill; skills that may have the same documents share a pool."""
    pools: dict[tuple[str, ...], _Pool] = {}
    hands = {}
    for skill, shelves in suited.items():
        mine = []
        for number, documents in shelves.items():
            ids = tuple(item.id for item in documents)
            if ids not in pools:
                sharers = tuple(other for other in suited if suited[other].get(number) == documents)
                name = hashlib.blake2b("\n".join(ids).encode(), digest_size=8).hexdigest()
                deck = Deck(
                    len(ids),
                    seed=f"{seed}/{name}",
                    attempts=attempts,
                    sharers=1 if shared else len(sharers),
                )
                pools[ids] = _Pool(documents, sharers, deck)
            mine.append(pools[ids])
        weights = [library.shelves[number].weight for number in shelves]
        if mine:
            hands[skill] = _Hand(tuple(mine), Mixture(weights, seed=f"{seed}/mixture"))
    return hands


def _ids(shelves: _Suited) -> tuple[tuple[int, str], ...]:
    return tuple((number, item.id) for number, documents in shelves.items() for item in documents)


def _suited(library: Library, skill: str, pattern: str) -> _Suited:
    chosen = {
        number: _matching(shelf.documents, pattern) if pattern else _of_skill(shelf.documents, skill)
        for number, shelf in enumerate(library.shelves)
    }
    found = {number: documents for number, documents in chosen.items() if documents}
    if pattern and library.shelves and not found:
        raise ConfigError(
            f"no document of the corpus matches {pattern!r}, which the skill {skill} asks for",
            where="designer.custom_skills",
            remedy="The pattern is a glob over document ids; an empty one takes all documents.",
        )
    return found


def _matching(documents: tuple[Document, ...], pattern: str) -> tuple[Document, ...]:
    return tuple(item for item in documents if fnmatchcase(item.id, pattern))


def _of_skill(documents: tuple[Document, ...], skill: str) -> tuple[Document, ...]:
    for wanted in (skill, ""):
        found = tuple(item for item in documents if item.skill == wanted)
        if found:
            return found
    return documents
