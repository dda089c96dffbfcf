"""The designer role: designs of one prompt, and designers that are not trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from designer_stage import BAD, GOOD, Policy, Stage, quick, tokens
from role_fakes import COUNTER, FakeChat
from scenes.endpoint_fake import Say, fake_endpoint, talking_vllm
from scenes.small_run import ticket

from bus.messages import DesignFailed, DesignSample, EnvironmentReady
from engine.config import EndpointConfig, FrozenConfig, PoolConfig
from engine.inference.completion import InferenceUnavailable

DESIGNS = ("d1", "d2", "d3")


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


def numbered(number: int) -> str:
    """A good program unlike the others."""
    return f"```python\n{COUNTER.replace('count from', f'count {number} from')}```"


def prompts(held: list[DesignSample]) -> set[tuple[int, ...]]:
    """Return the distinct prompts that the held designs answer."""
    return {tuple(tokens(one.segments[0], trained=False)) for one in held}


# Designs of one prompt


async def test_the_designs_of_a_group_answer_one_prompt(tmp_path: Path) -> None:
    policy = Policy(*(numbered(n) for n in range(3)))
    stage = Stage(tmp_path, policy, designs_per_ticket=3)
    facts = await stage.answers(*[EnvironmentReady] * 3, to=[ticket(slot=6, designs=DESIGNS)])
    assert {(fact.design, fact.slot) for fact in facts} == {("d1", 6), ("d2", 7), ("d3", 8)}
    assert len({fact.environment for fact in facts}) == 3
    held = await stage.held()
    assert len(prompts(held)) == 1
    assert len({one.document for one in held}) == 1
    designs = [call for call in stage.pool.calls if "<program>" not in FakeChat().decode(call["prompt"])]
    assert len(designs) == 3
    assert {call["key"] for call in designs} == {"d1"}, "one server holds their common prefix"
    assert stage.pool.most_busy == 3


async def test_further_attempts_of_a_group_answer_the_same_prompt(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(BAD, BAD, BAD, GOOD), designs_per_ticket=3)
    await stage.answer(6, ticket(designs=DESIGNS))
    held = await stage.held()
    assert sorted(one.attempt for one in held) == [0, 0, 0, 1, 1, 1]
    assert len(prompts(held)) == 1


async def test_a_fault_of_one_design_does_not_cost_the_others(tmp_path: Path) -> None:
    """The group comes back, published designs are not written again, and the prompt is that of the group."""
    policy = Policy(GOOD, InferenceUnavailable("gone"), GOOD)
    stage = Stage(tmp_path, policy, designs_per_ticket=3)
    facts = await stage.answer(3, ticket(designs=DESIGNS))
    assert {fact.design for fact in facts} == set(DESIGNS)
    held = await stage.held()
    assert len(held) == 3
    assert len(prompts(held)) == 1
    assert len(policy.design_prompts) == 4
    assert stage.designer.statistics()["handed_back"] == 1


async def test_a_lasting_fault_fails_what_is_not_answered(tmp_path: Path) -> None:
    down = InferenceUnavailable("no server")
    stage = Stage(tmp_path, Policy(GOOD, down), designs_per_ticket=2)
    facts = await stage.answer(2, ticket(designs=("d1", "d2"), issue=1))
    failed = [fact for fact in facts if isinstance(fact, DesignFailed)]
    assert [(fact.failure, fact.issue) for fact in failed] == [("infra", 1)]
    ready = {fact.design for fact in facts if isinstance(fact, EnvironmentReady)}
    assert ready | {fact.design for fact in failed} == {"d1", "d2"}


async def test_a_group_takes_up_the_prompt_of_its_published_tokens(tmp_path: Path) -> None:
    first = Stage(tmp_path, Policy(numbered(1)), designs_per_ticket=2)
    await first.answer(2, ticket(designs=("d1", "d2")))
    one, *_ = await first.held()
    second = Stage(tmp_path, Policy(numbered(2)), designs_per_ticket=2, target=0.9)
    await second.bus.publish(one)
    await second.answer(2, ticket(designs=("d1", "d2"), target=0.9))
    assert len(second.policy.design_prompts) == 1
    assert prompts(await second.held()) == prompts([one])


# Designers that are not trained


async def test_an_endpoint_designs_with_corpus_and_memory(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("all about tides")
    async with fake_endpoint(lambda _: Say(GOOD)) as fake:
        external = EndpointConfig(base_url=fake.url, model="frontier", context_tokens=60_000)
        corpus = f"dir:{tmp_path / 'corpus'}"
        stage = Stage(tmp_path, Policy(GOOD), kind="external", external=external, corpus=corpus)
        ready = await stage.ready()
    assert ready.document == "a.txt"
    assert ready.hint == "count upwards", "hints are the policy's, whoever designs"
    (body,) = fake.bodies
    assert "all about tides" in body["messages"][0]["content"]
    assert "# Interface" in body["messages"][0]["content"]
    assert stage.policy.design_prompts == []
    (held,) = await stage.held()
    assert (held.segments, held.text, held.valid) == ((), GOOD, True), "nothing for the learner"
    statistics = stage.designer.statistics()
    assert (statistics["external_tokens_in"], statistics["external_tokens_out"]) == (100, 20)


async def test_a_frozen_designer_designs_and_is_not_trained(tmp_path: Path) -> None:
    async with talking_vllm(lambda _: Say(GOOD), FakeChat()) as fake:
        stage = Stage(tmp_path, Policy("never asked"), kind="frozen", frozen=FrozenConfig(url=fake.url))
        ready = await stage.ready()
    assert ready.source.strip() == COUNTER.strip()
    assert stage.policy.design_prompts == []
    (held,) = await stage.held()
    assert (held.segments, held.text) == ((), GOOD)
    assert stage.designer.statistics()["frozen_requests"] == 1


async def test_a_pool_deals_its_programs_in_turn(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(3):
        (library / f"p{number}.py").write_text(COUNTER.replace("count from", f"count {number} from"))
    (library / "broken.py").write_text("class Nothing: pass")
    pool = PoolConfig(source=f"dir:{library}")
    stage = Stage(tmp_path, Policy("never asked"), kind="pool", pool=pool, concurrency=1)
    tickets = [ticket(f"d{number}", number=number, attempts=3) for number in range(4)]
    facts = await stage.answer(5, *tickets)
    firsts = [fact.document for fact in facts if getattr(fact, "attempt", -1) == 0]
    assert sorted(firsts) == ["broken.py", "p0.py", "p1.py", "p2.py"], "each once in a pass"
    ready = [fact for fact in facts if isinstance(fact, EnvironmentReady)]
    assert {fact.design for fact in ready} == {"d0", "d1", "d2", "d3"}
    assert {fact.hint for fact in ready} == {"count upwards"}
    assert stage.policy.design_prompts == []
    statistics = stage.designer.statistics()
    assert statistics["pool_programs"] == 4
