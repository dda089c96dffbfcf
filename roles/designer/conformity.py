"""Whether a design belongs to its ticket, and its text to its code. Pure.

Self-play at small scale was seen to fill the slots of other skills with its favourite game, and to make
mastered games hard again by a garbled display. A design is *off ticket* when it declares or is another
skill's game, or, where a classifier knows the programs, when nothing in it comes from its document: a free
program may tell of its document's mechanism in other words, so its overlap is only measured. A design is
*incoherent* when what it says was seen to be untrue. Only what was seen counts: a doubt is decided for the
design.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from bus.messages import Flag
from roles.designer import text_claims
from roles.designer.program_vocabulary import Anatomy, dissect, stems

if TYPE_CHECKING:
    from sandbox.probes import Transcript
    from sandbox.verdict import Episode, Verdict

RIVALS = 0.15
"""Share of other documents that may suit the program as well as its own."""
_FEWEST_OTHERS = 8
# A stem that at most this share of the documents has is the document's own.
_OWN_SHARE = 0.1
_LONG_DOCUMENT = 30
_ENOUGH_SHOWN = 3
_EPISODES, _DISTINCT = 4, 3
_NOTHING = "nothing in it comes from its document"

# The common words of English texts and of rules of games.
_STOP = stems(
    "the and for that this with you your are was were has have had not but from can may one two its "
    "their they them there then than which what when who how all any each every other into out over "
    "under more most some such only same also must will would should could about between after before "
    "again very just much first game player turn move step try tries goal win lose number numbers "
    "answer action observation reward next start last use used using make made give given take name "
    "value values list true false none seed"
)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """``flag`` with its ``reason``, both "" for a design that conforms. ``rivals`` is the share of other
    documents that suit the program at least as well as its own, None where there are too few to tell.
    """

    flag: Flag = ""
    reason: str = ""
    rivals: float | None = None


class Ticketed(NamedTuple):
    """What the ticket asked for, and the ``skills`` of the recipe. ``family_skill`` is the classifier, which
    tells the skill of a program that it knows, else None. With ``grounded`` a document's absence is a
    finding.
    """

    skill: str
    document: str = ""
    family_skill: Callable[[str], str | None] | None = None
    skills: tuple[str, ...] = ()
    grounded: bool = False


class Grounds:
    """How common each word is among ``documents``: what tells the words that are a document's own."""

    def __init__(self, documents: Sequence[str]) -> None:
        self._stems = [stems(text) - _STOP for text in documents]
        self._counts = Counter(stem for words in self._stems for stem in words)

    def rarity(self, stem: str) -> float:
        """Return the inverse document frequency of a stem."""
        return math.log((1 + len(self._stems)) / (1 + self._counts[stem])) + 0.1

    def own(self, document: str) -> frozenset[str]:
        """Return the stems of ``document`` that few of the others have."""
        limit = max(1.0, _OWN_SHARE * len(self._stems))
        return frozenset(stem for stem in stems(document) - _STOP if self._counts[stem] <= limit)

    def rivals(self, document: str, program: frozenset[str]) -> float | None:
        """Return the share of the other documents that have as much in common with ``program``."""
        mine = stems(document) - _STOP
        others = [words for words in self._stems if words != mine]
        if len(others) < _FEWEST_OTHERS or not mine:
            return None
        if not mine & program:
            return 1.0
        chances = self._chances(program)
        bound = self._excess(mine, program, chances)
        return sum(self._excess(words, program, chances) >= bound for words in others) / len(others)

    def _chances(self, program: frozenset[str]) -> dict[int, float]:
        """Return how likely it is that a word as common as so many documents is in ``program``, whatever it
        means; the commonness in powers of two.
        """
        known, shared = Counter[int](), Counter[int]()
        for stem, count in self._counts.items():
            known[count.bit_length()] += 1
            shared[count.bit_length()] += stem in program
        return {size: shared[size] / number for size, number in known.items()}

    def _excess(self, document: frozenset[str], program: frozenset[str], chances: dict[int, float]) -> float:
        """Return how much more the two have in common than by chance, in units of how much chance varies: a
        long document shares more words with any program, and no more of this.
        """
        excess = variance = 0.0
        for stem in document:
            weight, chance = self.rarity(stem), chances.get(max(self._counts[stem], 1).bit_length(), 0.0)
            excess += weight * ((stem in program) - chance)
            variance += weight**2 * chance * (1.0 - chance)
        return excess / math.sqrt(variance) if variance else 0.0


def examine(source: str, verdict: Verdict, ticket: Ticketed, grounds: Grounds) -> Finding:
    """Return what is found about an accepted program; the first finding counts."""
    if reason := _other_skill(source, verdict, ticket):
        return Finding(flag="off_ticket", reason=reason)
    reason, rivals = _ungrounded(dissect(source), verdict.episodes, ticket.document, grounds)
    if reason and ticket.grounded:
        return Finding(flag="off_ticket", reason=reason, rivals=rivals)
    return Finding(flag="incoherent" if (said := incoherence(verdict)) else "", reason=said, rivals=rivals)


def incoherence(verdict: Verdict) -> str:
    """Say what the text got wrong about the code, as far as it was seen; "" for nothing."""
    played = [episode.transcript for episode in verdict.episodes if _plain(episode)]
    firsts = dict.fromkeys([*verdict.first_observations, *(transcript.first for transcript in played)])
    for check in (_untrue_tries, _untrue_goal, _untrue_end):
        if reason := check(played):
            return reason
    garbled = [reason for reason in map(text_claims.garbled, firsts) if reason]
    return f"the text is garbled: {garbled[0]}" if 2 * len(garbled) > len(firsts) else ""


def _other_skill(source: str, verdict: Verdict, ticket: Ticketed) -> str:
    """Whether another skill of the recipe is declared (a free spelling of a skill is none), or played."""
    declared = verdict.metadata.skill if verdict.metadata else None
    others = {_plainly(name) for name in ticket.skills} - {_plainly(ticket.skill)}
    if declared and _plainly(declared) in others:
        return f"it declares the skill {declared!r}, the ticket asks for {ticket.skill!r}"
    found = ticket.family_skill(source) if ticket.family_skill else None
    if found and _plainly(found) != _plainly(ticket.skill):
        return f"it is a game of {found}, the ticket asks for {ticket.skill}"
    return ""


def _ungrounded(
    parts: Anatomy, episodes: Iterable[Episode], document: str, grounds: Grounds
) -> tuple[str, float | None]:
    """Whether the document left no trace in what works and what is seen."""
    if not document.strip():
        return "", None
    transcripts = [episode.transcript for episode in episodes]
    later = stems(*(step.observation for transcript in transcripts for step in transcript.steps))
    first = stems(*(transcript.first for transcript in transcripts))
    rivals = grounds.rivals(document, parts.works | parts.shown | first | later)
    if rivals is None:
        return "", None
    if rivals > RIVALS:
        named = len(grounds.own(document) & parts.said) > 1
        where = "only comments name its document, or code of no use" if named else _NOTHING
        return f"{where}: {rivals:.0%} of the other documents suit it as well", rivals
    own = grounds.own(document)
    if len(own) >= _LONG_DOCUMENT:
        told = own & (parts.shown | first)
        if not own & (parts.works | later) and len(told) < _ENOUGH_SHOWN:
            return f"its document is only named ({', '.join(sorted(told))}), not needed to play", rivals
    return "", rivals


def _plain(episode: Episode) -> bool:
    """Whether an episode was played as somebody might who has read the text, and to its end."""
    honest = episode.policy.startswith(("sweep", "scan", "random", "constant", "solution"))
    return honest and not episode.transcript.error


def _untrue_tries(played: Sequence[Transcript]) -> str:
    """All episodes that were not won ended after the same number of actions, smaller than the tries that were
    said as the only limit, or none kept to it and several went beyond, in actions that were not refused.
    """
    lost = [t for t in played if not t.won and t.steps]
    said = [(text_claims.tries(t.first), t) for t in lost]
    claimed = [(claim, t) for claim, t in said if claim is not None]
    if len(claimed) < _EPISODES or len({t.actions for _, t in claimed}) < _DISTINCT:
        return ""
    if all(t.ended and len(t.steps) < claim.number for claim, t in claimed):
        lengths = {len(t.steps) for _, t in claimed}
        claim = claimed[0][0]
        alone = all(claim.strict and not text_claims.limits_failures(t.first) for claim, t in claimed)
        if len(lengths) == 1 and alone:
            return f"it says {claim.number} {claim.noun}, but ends after {min(lengths)}"
    beyond = {t.actions: len(t.steps) for claim, t in claimed if _counted(t) > claim.number}
    kept = [t for claim, t in claimed if t.ended and len(t.steps) <= claim.number]
    if len(beyond) >= _DISTINCT and not kept:
        claim = claimed[0][0]
        return f"it says {claim.number} {claim.noun}, but goes on until {max(beyond.values())}"
    return ""


def _counted(transcript: Transcript) -> int:
    """How many of the actions were not refused in words."""
    return sum(not text_claims.refuses(step.observation) for step in transcript.steps)


def _untrue_goal(played: Sequence[Transcript]) -> str:
    """Every win came before the number that was named, or every time it was reached the game went on."""
    early, reached = list[int](), list[bool]()
    for transcript in played:
        goal = text_claims.goal(transcript.first)
        if goal is None:
            continue
        for step in transcript.steps:
            number = text_claims.count(step.observation, goal.noun)
            if number is not None and number == goal.number:
                reached.append(step.terminated)
            elif number is not None and step.terminated and transcript.won and number < goal.number:
                early.append(number)
    goals = [goal for goal in (text_claims.goal(t.first) for t in played) if goal]
    if len(early) > 1 and not any(reached):
        return f"it asks for {goals[0].number} {goals[0].noun}, but {early[0]} win"
    if len(reached) > 1 and not any(reached):
        return f"it asks for {goals[0].number} {goals[0].noun}, but goes on when they are there"
    return ""


def _untrue_end(played: Sequence[Transcript]) -> str:
    """Every win is called a defeat, or every defeat a victory."""
    ended = [t for t in played if t.ended and t.steps[-1].terminated]
    won = [t.steps[-1].observation for t in ended if t.won]
    lost = [t.steps[-1].observation for t in ended if t.returned <= 0.0]
    if len(won) > 1 and all(map(text_claims.says_lost, won)):
        return f"it pays for {won[0][:60]!r}"
    if len(lost) > 1 and all(map(text_claims.says_won, lost)):
        return f"it pays nothing for {lost[0][:60]!r}"
    return ""


def _plainly(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())
