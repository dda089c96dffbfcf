"""Dealing documents: by the place of a ticket, without replacement, the same in every order and life."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import small_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bus.messages import DesignTicket
from engine.errors import ConfigError
from roles.designer.corpus import NO_DOCUMENT, Corpus, Document, LoadedCorpus, LoadedSource, cut
from roles.designer.corpus.sampler import EpochOrder, Mixture


class Words:
    """A tokenizer of words; spaces belong to the word after them."""

    def __init__(self) -> None:
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        pieces = [(" " if index else "") + word for index, word in enumerate(text.split(" "))] if text else []
        start = len(self._words)
        self._words += pieces
        return list(range(start, start + len(pieces)))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._words[index] for index in ids)


def documents(**skills: int) -> tuple[Document, ...]:
    return tuple(
        Document(f"{skill}{number}", f"text {number}", "" if skill == "any" else skill)
        for skill, count in skills.items()
        for number in range(count)
    )


def library(*shelves: tuple[Document, ...], weights: Sequence[float] = ()) -> LoadedCorpus:
    shares = weights or [1.0] * len(shelves)
    return LoadedCorpus(
        tuple(
            LoadedSource(f"s{number}", share, shelf)
            for number, (shelf, share) in enumerate(zip(shelves, shares, strict=True))
        )
    )


def corpus(*shelves: tuple[Document, ...], weights: Sequence[float] = (), **settings: Any) -> Corpus:
    values = {"skills": ("Logic", "Maths"), "limit": 100, "tokens": Words(), **settings}
    return Corpus(library(*shelves, weights=weights), **values)


def ticket(skill: str = "Logic", number: int = 0, turn: int = 0) -> DesignTicket:
    return small_run.ticket(f"d{number}", skill=skill, number=number, turn=turn)


Draw = tuple[DesignTicket, int]


def draws(tickets: int, attempts: int, skills: Sequence[str] = ("Logic", "Maths")) -> list[Draw]:
    """Every attempt of a run's first tickets, skills in turn."""
    found = []
    for number in range(tickets):
        which = ticket(skills[number % len(skills)], number, number // len(skills))
        found += [(which, attempt) for attempt in range(attempts)]
    return found


def dealt(deck: Corpus, order: Sequence[Draw]) -> dict[tuple[str, int], str]:
    return {(which.design, attempt): deck.draw(which, attempt).id for which, attempt in order}


SHELVES = st.sampled_from(
    [
        (documents(any=13),),
        (documents(Logic=7, Maths=4),),
        (documents(Logic=5, any=6),),
        (documents(any=11), documents(Logic=3)),
        (documents(any=2),),
    ]
)


@given(SHELVES, st.integers(1, 4), st.integers(0, 99), st.randoms(use_true_random=False))
def test_a_draw_depends_on_its_ticket_and_attempt_only(
    shelves: tuple[tuple[Document, ...], ...], attempts: int, seed: int, rng: random.Random
) -> None:
    """In any order, with any of the draws left out, and by a corpus that starts in the middle."""
    order = draws(20, attempts)
    first = dealt(corpus(*shelves, attempts=attempts, seed=seed), order)
    some = rng.sample(order, rng.randint(1, len(order)))
    assert dealt(corpus(*shelves, attempts=attempts, seed=seed), some).items() <= first.items()


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
def test_no_document_comes_back_within_an_epoch(size: int, attempts: int, sharers: int, seed: int) -> None:
    order = EpochOrder(size, seed=str(seed), attempts=attempts, sharers=sharers)
    by_epoch: dict[int, list[int]] = {}
    for index in range(3 * size + attempts):
        drawn = order.draw(index)
        assert drawn.done == len(by_epoch.setdefault(drawn.epoch, []))
        by_epoch[drawn.epoch].append(drawn.position)
    assert all(len(set(positions)) == len(positions) for positions in by_epoch.values())
    assert len(by_epoch[0]) == order.length > size - attempts * sharers


@given(st.integers(10, 60), st.integers(2, 5))
def test_over_the_passes_nearly_every_document_is_a_first_attempt(size: int, attempts: int) -> None:
    order = EpochOrder(size, seed="s", attempts=attempts)
    firsts = [order.draw(index).position for index in range(0, attempts * order.length, attempts)]
    assert len(set(firsts)) >= size - 2 * attempts
    assert max(Counter(firsts).values()) <= 2


@given(st.integers(3, 30), st.integers(2, 3))
def test_the_attempts_of_a_design_have_different_documents(size: int, attempts: int) -> None:
    deck = corpus(documents(any=size), attempts=attempts)
    by_design: dict[str, set[str]] = {}
    for (design, _), document in dealt(deck, draws(40, attempts)).items():
        by_design.setdefault(design, set()).add(document)
    assert {len(found) for found in by_design.values()} == {attempts}


def test_skills_with_documents_of_their_own_use_up_all_of_them() -> None:
    deck = corpus(documents(Logic=6, Maths=4))
    found = dealt(deck, draws(20, 1))
    logic = [found[f"d{number}", 0] for number in range(0, 20, 2)]
    maths = [found[f"d{number}", 0] for number in range(1, 20, 2)]
    assert {*logic[:6]} == {f"Logic{number}" for number in range(6)}
    assert {*maths[:4]} == {*maths[4:8]} == {f"Maths{number}" for number in range(4)}


def test_skills_that_share_documents_do_not_get_the_same_ones() -> None:
    deck = corpus(documents(any=12, Space=3), skills=("Logic", "Maths", "Space"))
    found = dealt(deck, draws(18, 1, ("Logic", "Maths", "Space")))
    general = [document for document in found.values() if document.startswith("any")]
    assert len(general) == len(set(general)) == 12


def test_another_list_of_skills_changes_no_draw_from_a_shared_corpus() -> None:
    six = ("Logic", "Maths", "Space", "Pattern", "Best", "Cause")
    shelves = (documents(any=30), documents(any=9))
    by_six = dealt(corpus(*shelves, skills=six, attempts=2), draws(40, 2, six))
    by_two = dealt(corpus(*shelves, attempts=2), draws(40, 2))
    assert by_six == by_two


def test_skill_then_general_then_any() -> None:
    mixed = (*documents(Logic=1), Document("open", "text"))
    deck = corpus(mixed)
    assert deck.draw(ticket("Logic"), 0).id == "Logic0"
    assert deck.draw(ticket("Maths"), 0).id == "open"
    assert corpus(documents(Logic=1)).draw(ticket("Maths"), 0).id == "Logic0"
    assert deck.draw(ticket("Unheard of"), 0).id == "Logic0"


def test_a_filter_takes_what_matches_and_nothing_else() -> None:
    deck = corpus(documents(any=5), documents(Logic=4), filters={"Maths": "any[12]"})
    found = dealt(deck, draws(20, 1))
    assert {found[f"d{number}", 0] for number in range(1, 20, 2)} == {"any1", "any2"}
    assert len({found[f"d{number}", 0] for number in range(0, 20, 2)}) > 5
    with pytest.raises(ConfigError, match="which the skill Maths asks for"):
        corpus(documents(any=5), filters={"Maths": "nothing*"})


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=4), st.integers(0, 9))
def test_weights_are_kept_exactly_in_a_cycle(weights: list[float], seed: int) -> None:
    mixture = Mixture(weights, seed=str(seed))
    picked = [mixture.pick(draw) for draw in range(1000)]
    counts = Counter(source for source, _ in picked)
    for source, weight in enumerate(weights):
        assert abs(counts[source] - 1000 * weight / sum(weights)) <= len(weights)
        assert [rank for of, rank in picked if of == source] == list(range(counts[source]))
    source, rank = mixture.pick(3000)
    assert (source, rank) == (picked[0][0], 3 * counts[picked[0][0]])


def test_exhaustion_is_counted() -> None:
    deck = corpus(documents(any=10))
    fresh = deck.statistics()
    assert (fresh["corpus_epoch"], fresh["corpus_left"], fresh["corpus_unused"]) == (0, 10, 10)
    dealt(deck, draws(7, 1))
    deck.note_used("any0")
    deck.note_used("gone")
    deck.note_used("")
    used = deck.statistics()
    assert (used["corpus_epoch"], used["corpus_left"]) == (1, 3)
    assert used["corpus_unused"] in (2, 3)
    dealt(deck, draws(23, 1))
    assert deck.statistics()["corpus_epoch"] == 3
    assert deck.statistics()["corpus_left"] == 7
    assert deck.statistics()["corpus_unused"] == 0


def test_the_empty_corpus_gives_no_document() -> None:
    assert corpus().draw(ticket(), 0) == NO_DOCUMENT
    assert corpus().statistics() == {"documents": 0}


class Bytes:
    """A byte-level BPE of a few merges, which splits characters and joins words across cuts."""

    def __init__(self) -> None:
        self._bpe = Tokenizer(models.BPE())
        self._bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        self._bpe.train_from_iterator(["the theory of the thing", "naïve café"] * 3, trainer)

    def encode(self, text: str) -> list[int]:
        return list(self._bpe.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._bpe.decode(list(ids)))


BPE = Bytes()


@given(st.text("the café ï\n🙂", max_size=60), st.integers(0, 30))
def test_cutting_counts_tokens_of_a_real_tokenizer(text: str, limit: int) -> None:
    short = cut(text, limit, BPE)
    assert text.startswith(short)
    assert len(BPE.encode(short)) <= limit
    assert short == text or len(BPE.encode(text)) > limit


def test_documents_are_cut_for_the_prompt() -> None:
    deck = corpus((Document("long", " ".join("w" * 50)),), limit=8)
    found = deck.cut(deck.draw(ticket(), 0))
    assert 4 <= len(found.text.split()) <= 8
    assert deck.get("long") == found
    assert deck.get("unknown") == NO_DOCUMENT
