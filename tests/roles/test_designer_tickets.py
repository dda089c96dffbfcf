"""The designer role: repair turns, designs of one prompt, and designers that are not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from designer_stage import BAD, GOOD, Policy, Stage, quick, tokens
from role_fakes import COUNTER, STOP, USER, FakeChat
from scenes.endpoint_fake import Say, fake_endpoint, talking_vllm
from scenes.small_run import ticket

from bus.messages import DesignFailed, DesignRejected, DesignSample, EnvironmentReady
from engine.config import EndpointConfig, FrozenConfig, PoolConfig, SamplingConfig
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


# Repair


async def test_a_repair_goes_on_in_the_same_conversation(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(BAD, GOOD), repair=True)
    rejected, ready = await stage.answers(DesignRejected, EnvironmentReady)
    assert (rejected.attempt, ready.attempt) == (0, 1)
    assert ready.prompt == "repair_full/1"
    assert ready.document == rejected.document
    first, second = (call["prompt"] for call in stage.pool.calls[:2])
    chat = FakeChat()
    assert second[: len(first)] == first
    assert second[len(first) : len(first) + len(BAD) + 1] == [*chat.encode(BAD), STOP]
    assert second[len(first) + len(BAD) + 1] == USER
    message = chat.decode(second[len(first) + len(BAD) + 1 :])
    assert "class Nothing" in message
    assert "no class whose name ends in Env" in message
    assert 'check "load"' in message


async def test_each_turn_of_a_repair_is_trained_with_its_own_credit(tmp_path: Path) -> None:
    """A first turn that had to be mended is an invalid attempt, whatever becomes of the program."""
    stage = Stage(tmp_path, Policy(BAD, GOOD), repair=True)
    await stage.answer(2)
    first, second = await stage.held()
    assert [(held.attempt, held.valid) for held in (first, second)] == [(0, False), (1, True)]
    chat = FakeChat()
    assert tokens(first.segments[0], trained=True) == [*chat.encode(BAD), STOP]
    (segment,) = second.segments
    assert tokens(segment, trained=True) == [*chat.encode(GOOD), STOP]
    assert tokens(segment, trained=False) == stage.pool.calls[1]["prompt"], "what it answers carries no loss"


async def test_after_a_failed_repair_comes_a_fresh_attempt(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(BAD, BAD, GOOD), repair=True)
    await stage.answers(DesignRejected, DesignRejected, EnvironmentReady, to=[ticket(attempts=5)])
    lengths = [len(call["prompt"]) for call in stage.pool.calls[:3]]
    assert lengths[1] > lengths[0] == lengths[2]


async def test_a_repair_without_room_is_a_fresh_attempt(tmp_path: Path) -> None:
    long = f"```python\nclass Nothing: pass\n{'#' * 9000}\n```"
    stage = Stage(tmp_path, Policy(long, GOOD), repair=True, sampling=SamplingConfig(max_tokens=9500))
    _, ready = await stage.answers(DesignRejected, EnvironmentReady)
    assert ready.prompt.startswith("design_full")
    assert len(stage.pool.calls[0]["prompt"]) == len(stage.pool.calls[1]["prompt"])


async def test_where_the_template_rewrites_history_a_repair_stands_alone(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Policy(BAD, GOOD), repair=True)
    chat = FakeChat(rewrites=True)
    stage.context.shared["chat"] = chat  # type: ignore[index]
    await stage.answers(DesignRejected, EnvironmentReady)
    asked = chat.decode(stage.pool.calls[1]["prompt"])
    assert "class Nothing" in asked
    assert "# Interface" not in asked


async def test_a_redelivered_repair_continues_from_its_published_turn(tmp_path: Path) -> None:
    policy = Policy(BAD, InferenceUnavailable("gone"), GOOD)
    stage = Stage(tmp_path, policy, repair=True)
    await stage.answers(DesignRejected, EnvironmentReady)
    prompts = [call["prompt"] for call in stage.pool.calls[:3]]
    assert prompts[1] == prompts[2], "the same conversation, from the tokens that are held"


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
    assert len({call["seed"] for call in designs}) == 3
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


async def test_a_repair_is_no_prompt_of_a_group(tmp_path: Path) -> None:
    """The repaired attempt is the first held one if invalid attempts are dropped."""
    settings: dict[str, Any] = {"repair": True, "invalid": "drop"}
    first = Stage(tmp_path, Policy(BAD, GOOD), **settings)
    await first.answer(2, ticket("d1"))
    (mended,) = await first.held()
    assert mended.prompt == "repair_full/1"
    second = Stage(tmp_path, Policy(GOOD), designs_per_ticket=2, **settings)
    await second.bus.publish(mended)
    await second.answer(2, ticket(designs=("d1", "d2")))
    one, other = second.policy.design_prompts
    assert one == other
    assert "was not accepted" not in one


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


async def test_an_endpoint_mends_in_the_same_conversation(tmp_path: Path) -> None:
    replies = [BAD, GOOD]
    async with fake_endpoint(lambda _: Say(replies.pop(0))) as fake:
        external = EndpointConfig(base_url=fake.url, model="m", context_tokens=60_000)
        stage = Stage(tmp_path, Policy(GOOD), kind="external", external=external, repair=True)
        await stage.answers(DesignRejected, EnvironmentReady)
    asked = fake.bodies[1]["messages"]
    assert [message["role"] for message in asked] == ["user", "assistant", "user"]
    assert asked[1]["content"] == BAD
    assert [held.valid for held in await stage.held()] == [True], "refused attempts of others are not held"


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
