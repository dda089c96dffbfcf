"""Documents and prompts of designs on the bus: the same in any order and after a restart."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from designer_stage import BAD, GOOD, Stage, quick
from role_fakes import FakeChat
from scenes.memory_bus import MemoryBus
from scenes.small_run import ticket

from bus.messages import DesignRejected, DesignSample, EnvironmentReady
from engine import prompts
from roles.designer.role import DesignerRole

TICKETS = 5
ATTEMPTS = 3


@pytest.fixture(autouse=True)
def validator(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    place = tmp_path / "documents"
    place.mkdir()
    for number in range(17):
        (place / f"{number}.txt").write_text(f"document number {number}.")
    return place


def policy(text: str, _: int) -> str:
    """Fails on every third document, so that some designs take several attempts."""
    if "<program>" in text:
        return "count upwards"
    number = int(text.partition("document number ")[2].partition(".")[0])
    return GOOD if number % 3 else BAD


async def live(
    directory: Path, bus: MemoryBus, documents: Path, numbers: list[int], *, concurrency: int
) -> DesignerRole:
    """Return a role that has answered these tickets."""
    settings = {"skills": ("Logic",), "attempts": ATTEMPTS, "concurrency": concurrency, "memory": False}
    stage = Stage(directory, policy, bus=bus, corpus=f"dir:{documents}", **settings)
    same = {"attempts": ATTEMPTS, "cohort": 0}
    await stage.work(*(ticket(f"d{n}", slot=n, number=n, turn=n, **same) for n in numbers))
    return stage.designer


async def grounded(bus: MemoryBus) -> dict[tuple[str, int], str]:
    """The document of every attempt that was made."""
    facts = [record.message async for record in bus.replay("EVENT")]
    return {
        (fact.design, fact.attempt): fact.document
        for fact in facts
        if isinstance(fact, EnvironmentReady | DesignRejected)
    }


def new_bus() -> MemoryBus:
    return MemoryBus(run="test", role="scorer", instance="s0")


async def test_documents_do_not_depend_on_order_company_or_lives(tmp_path: Path, documents: Path) -> None:
    numbers = list(range(TICKETS))
    whole = new_bus()
    await live(tmp_path / "a", whole, documents, numbers, concurrency=8)
    expected = await grounded(whole)
    assert len(set(expected.values())) == len(expected) > TICKETS

    shuffled = random.Random(4).sample(numbers, TICKETS)
    broken = new_bus()
    for part in (shuffled[:2], shuffled[2:]):
        await live(tmp_path / "b", broken, documents, part, concurrency=1)
    assert await grounded(broken) == expected


async def test_designs_say_what_they_were_asked_with(tmp_path: Path, documents: Path) -> None:
    bus = new_bus()
    role = await live(tmp_path, bus, documents, list(range(TICKETS)), concurrency=4)
    facts = [record.message async for record in bus.replay("EVENT")]
    held = [record.message async for record in bus.replay("SAMPLE")]
    designs = [
        fact for fact in (*facts, *held) if isinstance(fact, EnvironmentReady | DesignRejected | DesignSample)
    ]
    assert {type(design) for design in designs} == {EnvironmentReady, DesignRejected, DesignSample}
    assert {design.prompt for design in designs} == {prompts.version("design_full")}
    found = role.statistics()
    assert (found["documents"], found["skills_covered"], found["corpus_epoch"]) == (17, 1, 1)
    assert found["corpus_unused"] == 17 - len({design.document for design in designs})


async def test_a_long_prompt_holds_up_nobody_else(documents: Path, tmp_path: Path) -> None:
    """Counting its tokens is done in a thread: the loop of the process turns on."""
    threads = set[int]()
    chat = FakeChat()
    encode = chat.encode

    def slow(text: str) -> list[int]:
        if "document number" in text:
            threads.add(threading.get_ident())
        return encode(text)

    chat.encode = slow
    stage = Stage(tmp_path, policy, corpus=f"dir:{documents}")
    stage.context.shared["chat"] = chat  # type: ignore[index]
    await stage.work(ticket(attempts=3))
    assert threads
    assert threading.get_ident() not in threads
