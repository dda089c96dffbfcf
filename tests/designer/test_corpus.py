"""Grounding documents."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from roles.designer.corpus import NO_DOCUMENT, Corpus, Document, cut, load


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


def documents(**skills: int) -> list[Document]:
    return [
        Document(f"{skill}{number}", f"text {number}", skill)
        for skill, count in skills.items()
        for number in range(count)
    ]


@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 1000))
def test_no_document_comes_back_before_all_others(count: int, epochs: int, seed: int) -> None:
    corpus = Corpus(documents(Logic=count, Maths=3), limit=100, tokens=Words())
    rng = random.Random(seed)
    for _ in range(epochs):
        dealt = {corpus.draw("Logic", rng).id for _ in range(count)}
        assert dealt == {f"Logic{number}" for number in range(count)}


def test_counts_from_an_earlier_life_go_on() -> None:
    corpus = Corpus(documents(Logic=4), limit=100, tokens=Words())
    for used in ("Logic0", "Logic2", "gone", ""):
        corpus.note_used(used)
    assert {corpus.draw("Logic", random.Random(1)).id for _ in range(2)} == {"Logic1", "Logic3"}


def test_skill_then_general_then_any() -> None:
    mixed = [*documents(Logic=1), Document("open", "text")]
    corpus = Corpus(mixed, limit=100, tokens=Words())
    rng = random.Random(0)
    assert corpus.draw("Logic", rng).id == "Logic0"
    assert corpus.draw("Maths", rng).id == "open"
    assert Corpus(documents(Logic=1), limit=9, tokens=Words()).draw("Maths", rng).id == "Logic0"


def test_the_empty_corpus_gives_no_document() -> None:
    assert load("") == []
    assert Corpus([], limit=100, tokens=Words()).draw("Logic", random.Random(0)) == NO_DOCUMENT


def test_the_same_seeds_give_the_same_documents() -> None:
    draws = [
        [corpus.draw("Logic", random.Random(step)).id for step in range(20)]
        for corpus in (Corpus(documents(Logic=6), limit=100, tokens=Words()) for _ in range(2))
    ]
    assert draws[0] == draws[1]
    assert max(Counter(draws[0]).values()) - min(Counter(draws[0]).values()) <= 1


@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=30), st.integers(0, 40))
def test_cutting_keeps_a_prefix_within_the_limit(words: list[str], limit: int) -> None:
    text, tokens = " ".join(words), Words()
    short = cut(text, limit, tokens)
    assert text.startswith(short)
    assert len(tokens.encode(short)) <= limit
    if len(words) <= limit:
        assert short == text


def test_documents_are_cut_when_they_are_dealt() -> None:
    corpus = Corpus([Document("long", " ".join("w" * 50))], limit=8, tokens=Words())
    dealt = corpus.draw("Logic", random.Random(0))
    assert 4 <= len(dealt.text.split()) <= 8
    assert corpus.get("long") == dealt
    assert corpus.get("unknown") == NO_DOCUMENT


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    lines = [
        {"text": "one", "skill": "Logic", "other": 1},
        {"orig_doc": "two", "text": "not this", "id": 7},
        {"text": "  "},
        {"text": "three", "id": 7},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    loaded = load(f"jsonl:{path}")
    assert [(item.text, item.skill) for item in loaded] == [("one", "Logic"), ("two", ""), ("three", "")]
    assert len({item.id for item in loaded}) == 3


def test_jsonl_names_the_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(ConfigError, match="line 2"):
        load(f"jsonl:{path}")


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("bee")
    (tmp_path / "a.txt").write_text("ay")
    (tmp_path / "c.bin").write_bytes(b"\x00")
    assert [(item.id, item.text) for item in load(f"dir:{tmp_path}")] == [
        ("a.txt", "ay"),
        ("sub/b.md", "bee"),
    ]


def test_pydoc() -> None:
    loaded = load("pydoc:heapq, bisect")
    names = {item.id for item in loaded}
    assert "heapq" in names
    assert any(name.startswith("bisect") for name in names)
    assert all(len(item.text) > 100 for item in loaded)


@pytest.mark.parametrize(
    "source", ["ftp:x", "nonsense", "jsonl:/no/such/file", "dir:/no/such", "pydoc:no_such_module_x"]
)
def test_bad_sources_are_named(source: str) -> None:
    with pytest.raises(ConfigError):
        load(source)


def test_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no document"):
        load(f"dir:{tmp_path}")
