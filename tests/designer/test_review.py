"""The designer's own rungs (one game, conformity to the ticket, novelty), and the published verdict."""

from __future__ import annotations

import ast
from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes.judged_programs import judged
from scenes.small_run import ticket
from test_memory import ready

from engine.config import DesignerConfig
from engine.nano import seeds
from roles.designer.dead_code import dead_share
from roles.designer.memory import Memory
from roles.designer.review import Commission, Neighbours, Review, digest, published, ways_to_win
from sandbox import Rejected, Verdict
from sandbox.metadata import Metadata

DOCUMENTS = {document.id: document for document in seeds.documents()}
SKILLS = DesignerConfig().skills
PADDED = "\n".join(f"def unused_{n}(x):\n    y = x + {n}\n    return y" for n in range(12))


def game(high: int = 9, name: str = "number") -> str:
    return f"""import random
class GuessEnv:
    def __init__(self, max_turns=4):
        self.max_turns = max_turns
    def reset(self, seed=None):
        self.{name}, self.t = random.Random(seed).randint(1, {high}), 0
        return "A number from 1 to {high} is hidden. 4 tries.", {{}}
    def step(self, action):
        self.t += 1
        told = int(action)
        won = told == self.{name}
        text = "yes" if won else "higher" if told < self.{name} else "lower"
        return text, float(won), won, self.t >= 4, {{}}
"""


def review(
    memory: Memory | None = None, *, known: Neighbours | None = None, scale: Any = "full", **designer: Any
) -> Review:
    corpus: Any = SimpleNamespace(get=DOCUMENTS.__getitem__)
    settings = DesignerConfig(**designer)
    memory = Memory(10) if memory is None else memory
    return Review(
        settings,
        corpus=corpus,
        neighbours=known or Neighbours(memory, method="hashed", bound=settings.memory_duplicate),
        families=() if scale == "nano" else None,
    )


async def climb(
    reviewed: Review,
    source: str,
    *,
    skill: str = "Logical Deduction",
    design: str = "mine",
    document: str = "",
    declared: str | None = None,
) -> Verdict:
    """The verdict after the rungs of the review; a rejection names its rung."""
    verdict = Verdict(ok=True, rung="accepted", metadata=Metadata(skill=declared) if declared else None)
    commission = Commission(ticket(design, skill=skill), document)
    try:
        return await reviewed.check(source, commission, verdict)
    except Rejected as rejected:
        return Verdict(ok=False, rung=rejected.rung, reason=rejected.reason)


@pytest.mark.parametrize(
    ("declared", "flag"),
    [
        (None, ""),
        ("Logical Deduction", ""),
        ("logical-deduction", ""),
        ("Thinking hard", ""),
        ("Optimization", "off_ticket"),
    ],
)
async def test_another_skill_of_the_recipe_is_off_the_ticket(declared: str | None, flag: str) -> None:
    assert (await climb(review(), game(), declared=declared)).flag == flag


@pytest.mark.parametrize(
    ("designer", "rung", "flag"),
    [
        ({"conformity": "off"}, "accepted", ""),
        ({"conformity": "flag"}, "accepted", "off_ticket"),
        ({"conformity": "reject"}, "off_ticket", ""),
        ({"conformity": "reject", "kind": "pool"}, "accepted", ""),
    ],
)
async def test_the_recipe_decides_about_a_finding(designer: dict[str, Any], rung: str, flag: str) -> None:
    found = await climb(review(**designer), game(), declared="Optimization")
    assert (found.rung, found.flag) == (rung, flag)


def seed_program(family: seeds.Family, level: int, noun: str) -> str:
    return family.program(family.draw(level, Random(level), withheld=False), noun)


@pytest.mark.parametrize("family", seeds.families(), ids=lambda family: family.name)
async def test_seed_programs_conform_to_their_own_tickets_only(family: seeds.Family) -> None:
    reviewed = review(scale="nano")
    documents = [document for document in DOCUMENTS.values() if document.skill == family.skill]
    for level, document in zip(family.seed_levels, documents, strict=False):
        noun = next(noun for noun in seeds.NOUNS if noun in document.text)
        source = seed_program(family, level, noun)
        asked = {"document": document.id, "skill": family.skill}
        assert (await climb(reviewed, source, **asked)).flag == ""
        other = next(skill for skill in SKILLS if skill != family.skill)
        assert (await climb(reviewed, source, document=document.id, skill=other)).flag == "off_ticket"
        strange = next(noun for noun in seeds.NOUNS if noun not in document.text)
        found = await climb(reviewed, seed_program(family, level, strange), **asked)
        assert (found.flag, found.flag_reason) == ("off_ticket", "nothing in it comes from its document")


@pytest.mark.parametrize("family", seeds.families(), ids=lambda family: family.name)
async def test_a_seed_program_whose_text_and_code_disagree_is_incoherent(family: seeds.Family) -> None:
    document = next(document for document in DOCUMENTS.values() if document.skill == family.skill)
    noun = next(noun for noun in seeds.NOUNS if noun in document.text)
    source = seed_program(family, 2, noun)
    for old, new in (("{T} tries", "9 tries"), (">=T", ">=6"), ("0..{N}", "0..{N+3}")):
        lying = source.replace(old, new)
        found = await climb(review(scale="nano"), lying, document=document.id, skill=family.skill)
        assert found.flag == ("" if lying == source else "incoherent"), lying


@pytest.mark.parametrize(
    ("source", "share"),
    [
        ("a = 1\nb = a\n", 1.0),
        ("a = 1\nprint(a)\n", 0.0),
        ("class X(Y):\n    a = 1\n", 0.0),
        ("a = 1\ngetattr(x, 'a')\n", 0.0),
        ("class X:\n    def step(self, action):\n        self.a += 1\n", 1 / 3),
        ("class X:\n    def step(self, action):\n        self.a += 1; return self.a\n", 0.0),
        ("def f(a):\n    return a\nf(a=1)\n", 0.0),
        ("for a in (1, 2): print(a)\n", 0.0),
        ("def f():\n    return g()\ndef g():\n    return 1\n", 1.0),
        ("", 0.0),
    ],
)
def test_the_share_of_lines_that_nothing_reads(source: str, share: float) -> None:
    assert dead_share(ast.parse(source))[0] == pytest.approx(share)


async def test_a_program_that_is_mostly_of_no_use_is_incoherent() -> None:
    found = await climb(review(), game() + PADDED)
    assert found.flag == "incoherent"
    assert "unused_0" in found.flag_reason
    assert (await climb(review(), game() + PADDED + "\nprint(unused_0, vars())\n")).flag == ""


@given(st.sampled_from([game(), PADDED, "x = 1"]), st.text(alphabet="ab=1():\n +.", max_size=60))
def test_any_program_has_a_share(source: str, more: str) -> None:
    try:
        tree = ast.parse(f"{source}\n{more}")
    except SyntaxError:
        return
    assert 0.0 <= dead_share(tree)[0] <= 1.0


@pytest.mark.parametrize(
    ("source", "designer", "rung"),
    [
        (game(), {}, "accepted"),
        (game(), {"duplicates": "reject"}, "duplicate"),
        (game(name="secret"), {"duplicates": "reject", "memory_duplicate": 0.9}, "duplicate"),
        (game(name="secret"), {"duplicates": "reject", "memory_duplicate": 1.0}, "accepted"),
        (PADDED, {"duplicates": "reject", "conformity": "off"}, "accepted"),
    ],
)
async def test_near_copies_of_remembered_programs(source: str, designer: dict[str, Any], rung: str) -> None:
    memory = Memory(10)
    memory.ready(ready(1, source=game()))
    reviewed = review(memory, **designer)
    found = await climb(reviewed, source)
    assert found.rung == rung
    if rung == "accepted":
        assert found.near == "e1"
        assert found.similarity is not None
    assert bool(reviewed.statistics()) is (source == game() or rung == "duplicate")


async def test_a_design_is_no_copy_of_itself() -> None:
    memory = Memory(10)
    memory.ready(msgspec.structs.replace(ready(1, source=game()), design="mine"))
    found = await climb(review(memory, duplicates="reject"), game())
    assert (found.rung, found.near, found.similarity) == ("accepted", "", None)


async def test_of_two_twins_in_flight_one_is_accepted() -> None:
    """An accepted program counts at once, though memory learns of it much later."""
    known, rungs = Neighbours(Memory(10), method="hashed"), dict[str, str]()
    reviewed = review(known=known, duplicates="reject")

    async def one(design: str) -> None:
        rungs[design] = (await climb(reviewed, game(), design=design)).rung

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(one, f"d{number}")
    assert sorted(rungs.values()) == ["accepted", "duplicate", "duplicate", "duplicate"]
    (first,) = (design for design, rung in rungs.items() if rung == "accepted")
    await one(first)
    assert rungs[first] == "accepted", "it is no copy of itself"
    known.release(first)
    await one("late")
    assert rungs["late"] == "accepted", "a failed design blocks no other"


async def test_a_rejected_program_blocks_no_other() -> None:
    reviewed = review(duplicates="reject", conformity="reject")
    assert (await climb(reviewed, game(), design="a", declared="Optimization")).rung == "off_ticket"
    assert (await climb(reviewed, game(), design="b")).rung == "accepted"


async def test_a_claim_lasts_until_memory_has_the_design() -> None:
    memory = Memory(10)
    near = Neighbours(memory, method="hashed")
    mine, strict = digest(game()), {"unless_close": True}
    await near.claim(game(), design="one")
    assert (await near.claim(game(), design="two", **strict)).environment == mine
    memory.ready(msgspec.structs.replace(ready(1, source=game()), design="one"))
    assert (await near.claim(game(), design="three", **strict)).environment == "e1"
    near.release("one")
    assert (await near.claim(game(), design="four", **strict)).environment == "e1"


def test_the_published_verdict_tells_how_instances_are_won() -> None:
    found, wins = published(judged(game(), turns=4)), ways_to_win(judged(game(), turns=4))
    assert (found.rung, found.title) == ("", "A number from 1 to 9 is hidden. 4 tries.")
    assert set(wins.alone) <= set(map(str, range(1, 10)))
    assert wins.instances == 6
    refused = published(Verdict(ok=False, rung="parse", reason="line 3"))
    assert (refused.rung, refused.reason) == ("parse", "line 3")
