"""Designs that belong to their ticket, and designs that do not."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
from conformity_cases import CONFORMING, DOCUMENTS, INCOHERENT, OFF_TICKET, UNGROUNDED, Case, guess
from hypothesis import given
from hypothesis import strategies as st
from played import Host, judged
from test_memory import ready

from bus.messages import DesignTicket
from engine import seeds
from engine.config import Config, ModelConfig, RunConfig
from engine.config import DesignerConfig as DesignerConfig
from roles.designer import text_claims
from roles.designer.conformity import RIVALS, Finding, Grounds, Ticketed, examine
from roles.designer.dead_code import unused
from roles.designer.memory import Memory
from roles.designer.near_duplicates import Neighbours
from roles.designer.prober import probe
from roles.designer.program_vocabulary import dissect, stem, stems
from roles.designer.review import Inspector, Notes
from sandbox import SandboxUnavailable
from sandbox.errors import EnvCrashed

SEED_DOCUMENTS = {document.id: document.text for document in seeds.documents()}


class FakeCorpus:
    """The documents of the cases, or those of the seeds."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def get(self, document: str) -> Any:
        return SimpleNamespace(text=self._texts[document])

    def sample(self, count: int) -> list[str]:
        every = max(1, -(-len(self._texts) // count))
        return list(self._texts.values())[::every]


def recipe(nano: bool = False, **designer: Any) -> Config:
    model = ModelConfig(path="", max_model_len=4096, scale="nano" if nano else "full")
    return Config(
        run=RunConfig(name="t"), model=model, designer=DesignerConfig(similarity="hashed", **designer)
    )


def ticket(skill: str, design: str = "mine") -> DesignTicket:
    return DesignTicket(design=design, cohort=0, slot=0, skill=skill, seed=1, attempts=1, target=0.5, round=0)


async def look(
    case: Case, *, held: bool | None = None, memory: Memory | None = None, host: Any = None, **designer: Any
) -> Notes:
    nano = case.document not in DOCUMENTS and bool(case.document)
    corpus: Any = FakeCorpus(SEED_DOCUMENTS if nano else DOCUMENTS)
    inspector = Inspector(
        recipe(nano, **designer),
        host=host or Host(),
        corpus=corpus,
        memory=Memory(10) if memory is None else memory,
    )
    verdict = judged(case.source, turns=case.turns)
    return await inspector.look(ticket(case.skill), case.source, verdict, case.document, held=held)


def by_name(cases: tuple[Case, ...]) -> Any:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@by_name(CONFORMING)
async def test_designs_that_conform(case: Case) -> None:
    assert (await look(case)).finding.flag == ""


@by_name(OFF_TICKET)
async def test_designs_that_are_off_their_ticket(case: Case) -> None:
    finding = (await look(case)).finding
    assert finding.flag == "off_ticket"
    assert case.said in finding.reason


@by_name(UNGROUNDED)
async def test_a_document_without_a_trace_is_a_finding_where_grounding_is_on(case: Case) -> None:
    text, grounds = DOCUMENTS[case.document], Grounds(list(DOCUMENTS.values()))
    verdict = judged(case.source, turns=case.turns)
    found = examine(case.source, verdict, Ticketed(case.skill, text, grounded=True), grounds)
    assert found.flag == "off_ticket"
    assert case.said in found.reason
    assert (await look(case)).finding == Finding(rivals=found.rivals)
    assert (await look(case, grounding="count")).finding == Finding(rivals=found.rivals)
    strict = await look(case, grounding="on", conformity="reject")
    assert (strict.finding, strict.rung) == (found, "off_ticket")


async def test_programs_that_other_documents_suit_as_well_are_counted() -> None:
    case = UNGROUNDED[0]
    corpus: Any = FakeCorpus(DOCUMENTS)
    inspector = Inspector(recipe(), host=Host(), corpus=corpus, memory=Memory(10))
    verdict = judged(case.source, turns=case.turns)
    notes = await inspector.look(ticket(case.skill), case.source, verdict, case.document, held=None)
    assert (notes.finding.rivals or 0.0) > RIVALS
    assert inspector.statistics() == {"conformity_ungrounded": 1}


@by_name(INCOHERENT)
async def test_designs_whose_text_and_code_disagree(case: Case) -> None:
    finding = (await look(case)).finding
    assert finding.flag == "incoherent", finding
    assert case.said in finding.reason


def test_the_tables_are_of_a_size() -> None:
    assert len(CONFORMING) >= 20
    assert len(OFF_TICKET) + len(UNGROUNDED) + len(INCOHERENT) >= 20


@pytest.mark.parametrize("family", seeds.families(), ids=lambda family: family.name)
async def test_no_seed_program_is_flagged(family: seeds.Family) -> None:
    """Every level, withheld parameters as well, each on a document of its own."""
    rng = Random(11)
    config, corpus = recipe(True), FakeCorpus(SEED_DOCUMENTS)
    inspector = Inspector(config, host=Host(), corpus=corpus, memory=Memory(1))  # type: ignore[arg-type]
    flagged = []
    for level in seeds.LEVELS:
        for withheld in (False, True):
            for index in range(2):
                try:
                    parameters = family.draw(level, rng, withheld=withheld)
                except ValueError:
                    continue
                noun = rng.choice(seeds.NOUNS)
                source = family.program(parameters, noun)
                verdict = judged(source, turns=family.max_turns)
                document = f"{family.name}-{index}-{noun}"
                notes = await inspector.look(ticket(family.skill), source, verdict, document, held=None)
                if notes.finding.flag:
                    flagged.append((notes.finding, source))
    assert flagged == []


async def test_what_the_recipe_does_about_a_finding() -> None:
    case = OFF_TICKET[0]
    assert await look(case, conformity="off") == Notes(answers=(await look(case)).answers)
    flagged = await look(case, conformity="flag")
    assert (flagged.finding.flag, flagged.rung) == ("off_ticket", "")
    rejected = await look(case, conformity="reject")
    assert (rejected.rung, rejected.reason) == ("off_ticket", rejected.finding.reason)
    assert (await look(case, conformity="reject", held=True)).rung == ""
    assert (await look(case, kind="pool")).finding == Finding()


async def test_near_copies_are_counted_and_rejected_where_the_recipe_says_so() -> None:
    memory = Memory(10)
    memory.ready(ready(1, source=guess()))
    copy = Case("copy", guess(name="secret"))
    other = Case("other", CONFORMING[12].source)
    noted = await look(copy, memory=memory)
    assert (noted.near.environment, noted.rung) == ("e1", "")
    assert noted.near.similarity > 0.9
    assert (await look(other, memory=memory, duplicates="reject")).rung == ""
    same = Case("same", guess())
    assert (await look(same, memory=memory, duplicates="reject")).rung == "duplicate"
    assert (await look(copy, memory=memory, duplicates="reject", memory_duplicate=0.9)).rung == "duplicate"
    assert (await look(copy, memory=memory, duplicates="reject", memory_duplicate=1.0)).rung == ""


async def test_what_an_earlier_life_decided_stands() -> None:
    memory = Memory(10)
    memory.ready(ready(1, source=guess()))
    same = Case("same", guess())
    assert (await look(same, memory=memory, duplicates="reject", held=True)).rung == ""
    assert (await look(same, held=False)).rung == "duplicate"


async def test_a_design_is_no_copy_of_itself() -> None:
    memory = Memory(10)
    memory.ready(msgspec.structs.replace(ready(1, source=guess()), design="mine"))
    noted = await look(Case("same", guess()), memory=memory, duplicates="reject")
    assert (noted.near.environment, noted.rung) == ("", "")


async def test_probes_end_with_the_program_and_hand_on_faults_of_the_sandbox() -> None:
    case = Case("guess", guess())
    assert (await look(case, host=Host(EnvCrashed(code=1)))).finding.flag == ""
    with pytest.raises(SandboxUnavailable):
        await look(case, host=Host(SandboxUnavailable("gone")))
    host = Host()
    verdict = judged(case.source)
    seen = await probe(host, case.source, verdict, max_turns=12, seed=7)
    assert all(instance.closed for instance in host.instances)
    assert sum(instance.steps for instance in host.instances) <= 60
    assert set(seen.answers.alone) <= set(map(str, range(1, 10)))
    assert len(seen.answers.alone) > 1


@pytest.mark.slow
def test_a_long_document_suits_no_program_better_for_its_length() -> None:
    """Programs of random words: whatever the length of their document, half of the others suit as well."""
    rng = Random(3)
    letters = [rng.choice("bcdfglmnprst") + rng.choice("aeiou") for _ in range(6000)]
    words = ["".join(letters[at : at + 4]) for at in range(0, 6000, 4)]
    common = [1 / (place + 3) for place in range(len(words))]
    short, long = ([" ".join(rng.choices(words, common, k=size)) for _ in range(40)] for size in (30, 600))
    grounds = Grounds(short + long)
    programs = [stems(" ".join(rng.choices(words, common, k=150))) for _ in range(40)]
    for documents in (short, long):
        shares = [grounds.rivals(text, program) for text, program in zip(documents, programs, strict=True)]
        assert 0.35 < sum(share for share in shares if share is not None) / len(shares) < 0.65
        own = [grounds.rivals(text, stems(text)) for text in documents]
        assert own == [0.0] * len(own)


async def test_probes_play_instances_that_no_program_can_foresee() -> None:
    """They follow from the run's seed and the design, and are the same when it is looked at again."""
    case, played = Case("guess", guess()), list[int]()

    class Watched(Host):
        async def spawn(self, source: str, **arguments: Any) -> Any:
            played.append(arguments["seed"])
            return await super().spawn(source, **arguments)

    for design, seed in (("a", 1), ("a", 1), ("b", 1), ("a", 2)):
        config = msgspec.structs.replace(recipe(), run=RunConfig(name="t", seed=seed))
        absent: Any = FakeCorpus({})
        inspector = Inspector(config, host=Watched(), corpus=absent, memory=Memory(10))
        await inspector.look(ticket("x", design), case.source, judged(case.source), "", held=None)
    assert played[0] == played[1]
    assert len(set(played)) == 3


async def test_of_two_twins_in_flight_one_is_accepted() -> None:
    """Memory is told of a program long after it was compared: what is accepted counts at once."""
    absent: Any = FakeCorpus({})
    config = recipe(duplicates="reject", conformity="off")
    inspector = Inspector(config, host=Host(), corpus=absent, memory=Memory(10))
    source, rungs = guess(), dict[str, str]()

    async def one(design: str) -> None:
        notes = await inspector.look(ticket("x", design), source, judged(source), "", held=None)
        rungs[design] = notes.rung

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(one, f"d{number}")
    assert sorted(rungs.values()) == ["", "duplicate", "duplicate", "duplicate"]
    (first,) = (design for design, rung in rungs.items() if not rung)
    await one(first)
    assert rungs[first] == "", "it is no copy of itself"
    inspector.release(first)
    await one("late")
    assert rungs["late"] == "", "what came to nothing stands in nobody's way"


async def test_what_is_off_its_ticket_stands_in_nobodys_way() -> None:
    absent: Any = FakeCorpus({})
    config = recipe(duplicates="reject", conformity="reject")
    inspector = Inspector(config, host=Host(), corpus=absent, memory=Memory(10))
    case = OFF_TICKET[0]
    rungs = [
        (await inspector.look(ticket(skill, skill[:5]), case.source, judged(case.source), "", held=None)).rung
        for skill in (case.skill, "Causal Inference")
    ]
    assert rungs == ["off_ticket", ""]


async def test_a_claim_lasts_until_memory_has_the_design() -> None:
    memory = Memory(10)
    near = Neighbours(memory, method="hashed")
    await near.claim(guess(), "e1", design="one")
    assert (await near.claim(guess(), "e1", design="two", unless_close=True)).environment == "e1"
    assert list(near._claims) == ["one"]
    memory.ready(msgspec.structs.replace(ready(1, source=guess()), design="one"))
    assert (await near.claim(guess(), "e1", design="three", unless_close=True)).environment == "e1"
    assert list(near._claims) == []


async def test_a_known_program_costs_one_vector() -> None:
    near = Neighbours(Memory(10), method="hashed")
    for number in range(4):
        await near.claim(guess(), f"e{number}", design=str(number))
    assert [row.base for row in near._vectors.values()] == [None] * 3


@given(st.text(max_size=400), st.text(max_size=200), st.sampled_from(list(DOCUMENTS.values())))
def test_any_text_is_examined(source: str, first: str, document: str) -> None:
    """Whatever a program and its observations are, there is an answer, the same each time."""
    verdict = msgspec.structs.replace(judged(guess(), seeds=2), first_observations=(first,))
    asked = Ticketed("Logical Deduction", document)
    grounds = Grounds(list(DOCUMENTS.values()))
    finding = examine(source, verdict, asked, grounds)
    assert finding == examine(source, verdict, asked, grounds)
    assert bool(finding.flag) == bool(finding.reason)


@given(st.integers(1, 40), st.sampled_from(["tries", "guesses", "attempts", "chances", "turns", "moves"]))
def test_tries_are_read(count: int, noun: str) -> None:
    for text in (f"You have {count} {noun}.", f"{count} more {noun}, face n", f"in 0..9, {count} {noun}"):
        found = text_claims.tries(text)
        assert found is not None
        assert (found.number, found.noun) == (count, noun)
    assert text_claims.tries(f"{count} {noun} of {count + 1} {noun}") is None


@given(st.integers(0, 999), st.integers(1, 99))
def test_ranges_are_read(low: int, width: int) -> None:
    high = low + width
    for text in (
        f"in {low}..{high}, 3 tries",
        f"from {low} to {high}",
        f"between {low} and {high}.",
        f"({low}-{high})",
    ):
        assert text_claims.span(text) == (low, high)
    assert text_claims.span(f"{low}..{high} and {low}..{high + 1}") is None
    assert text_claims.span(f"{high}..{low}") is None


@pytest.mark.parametrize(
    ("text", "won", "lost"),
    [
        ("You win!", True, False),
        ("Congratulations.", True, False),
        ("Correct!", True, False),
        ("correct answer was 7", False, False),
        ("The correct answer was 7.", False, False),
        ("Not correct, you lose.", False, False),
        ("Wrong.", False, True),
        ("You lost", False, True),
        ("Game over: you win", False, False),
        ("nothing happens", False, False),
        ("yes", False, False),
        ("no, 5?", False, False),
        ("wrong turn, but you reached the exit", False, False),
    ],
)
def test_ends_are_read_with_care(text: str, won: bool, lost: bool) -> None:
    assert (text_claims.says_won(text), text_claims.says_lost(text)) == (won, lost)


@given(st.lists(st.sampled_from(["red", "tan", "blue", "gold"]), min_size=1, max_size=9))
def test_a_run_of_colours_is_not_garbled(words: list[str]) -> None:
    assert text_claims.garbled(f"The kites run {' '.join(words[:3] * 3)} ?, 2 tries") == ""
    assert text_claims.garbled("\n".join("# . # door #" for _ in words)) == ""


def test_words_are_told_apart_by_what_they_do() -> None:
    parts = dissect(
        '"""Docstring about whales."""\nMETADATA = {"goal": "penguins"}\n# comment about tigers\n'
        'class ZebraEnv:\n    """lions"""\n    def step(self, lever_arm):\n'
        '        if lever_arm == "kangaroo": return f"The walrus {lever_arm} swims"\n'
        '        return "A longer text about many ostriches here"\n'
    )
    assert {stem(word) for word in ("lever", "arm", "kangaroo")} <= parts.works
    assert stem("zebra") in parts.said - parts.works
    assert {stem(word) for word in ("walrus", "swims", "ostriches")} <= parts.shown
    assert {stem(word) for word in ("whales", "penguins", "tigers", "lions")} <= parts.said
    assert not {stem("whales"), stem("penguins"), stem("walrus")} & parts.works


@pytest.mark.parametrize(
    ("source", "idle"),
    [
        ("a = 1\nb = a\n", True),
        ("a = 1\nprint(a)\n", False),
        ("class X(Y):\n    a = 1\n", False),
        ("a = 1\ngetattr(x, 'a')\n", False),
        ("class X:\n    def step(self, action):\n        self.a += 1\n", True),
        ("class X:\n    def step(self, action):\n        self.a += 1; return self.a\n", False),
        ("def f(a):\n    return a\nf(a=1)\n", False),
        ("for a in (1, 2): print(a)\n", False),
    ],
)
def test_what_nothing_reads_is_of_no_use(source: str, idle: bool) -> None:
    assert ("a" in unused(source).names) is idle


@pytest.mark.slow
def test_a_large_program_of_no_use_is_read_in_time() -> None:
    lines = [f"w{number} = '\u2600'; v{number} = w{number}" for number in range(4000)]
    idle = unused("\n".join(lines))
    assert all(idle.covers((number, len(line) - 1)) for number, line in enumerate(lines, 1))
    assert not any(idle.covers((number, len(line))) for number, line in enumerate(lines, 1))
    assert dissect("x = 1\n" * 20_000).works == frozenset()


@given(st.text())
def test_any_text_is_dissected(source: str) -> None:
    parts = dissect(source)
    assert set().union(*parts) <= stems(source) | stems(source.replace("\\", " ")) | set().union(*parts)


@pytest.mark.parametrize(
    ("one", "other"), [("kites", "kite"), ("glaciers", "glacier"), ("absorbs", "absorbed"), ("tide", "tides")]
)
def test_forms_of_a_word_have_one_stem(one: str, other: str) -> None:
    assert stem(one) == stem(other)
