"""A ticket that comes again: what was published stands, whatever would be found now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from designer_stage import GOOD, FakeValidator, Policy, Stage, quick, verdict
from role_fakes import COUNTER
from scenes.small_run import ticket

from bus.messages import DesignFailed, DesignRejected, EnvironmentReady, Message
from engine.inference.completion import InferenceUnavailable
from roles.designer.review import ways_to_win
from sandbox import StepResult, Verdict
from sandbox.probes import Transcript
from sandbox.verdict import Episode


class Moods(FakeValidator):
    """Judges as ``mood`` says, which may change between two looks at the same program."""

    mood = ""
    looked = 0

    async def validate(self, source: str, **more: Any) -> Verdict:
        Moods.looked += 1
        found = await super().validate(source, **more)
        return verdict(Moods.mood, "a slow day") if found.ok and Moods.mood else found


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch, Moods)
    monkeypatch.setattr(Moods, "mood", "")
    monkeypatch.setattr(Moods, "looked", 0)


async def handed_down(tmp_path: Path, policy: Policy, **designer: Any) -> tuple[list[Message], Stage]:
    """Return the messages of a life that ended before its ticket was acknowledged, and the next life."""
    first = Stage(tmp_path, policy, **designer)
    await first.answer(1, ticket(attempts=1))
    later = Stage(tmp_path, Policy(InferenceUnavailable("must not be asked"), hints=("look up",)), **designer)
    held = await first.held()
    await later.bus.publish_all(held)
    return list(held), later


@pytest.mark.parametrize("mood", ["", "replay", "solution", "degenerate"])
async def test_a_held_design_is_told_of_as_it_was_found(mood: str, tmp_path: Path) -> None:
    """Also where probes come out otherwise now, or the pool is a slower one."""
    (held,), later = await handed_down(tmp_path, Policy(GOOD))
    Moods.mood, Moods.looked = mood, 0
    ready = await later.ready(ticket(attempts=1))
    assert ready.source.strip() == COUNTER.strip()
    assert (ready.finding, ready.hint) == (held.finding, "look up")
    assert Moods.looked == 0, "what was judged is not judged again"
    assert await later.held() == [held]


async def test_a_memory_that_has_grown_rejects_no_held_design(tmp_path: Path) -> None:
    (held,), later = await handed_down(tmp_path, Policy(GOOD), duplicates="reject")
    before = Stage(tmp_path, Policy(GOOD), bus=later.bus, duplicates="reject")
    twin = await before.ready(ticket("other", attempts=1))
    again = Stage(tmp_path, later.policy, bus=later.bus, duplicates="reject")
    _, ready = await again.answers(EnvironmentReady, EnvironmentReady, to=[ticket(attempts=1)])
    assert (ready.design, ready.environment) == ("d1", twin.environment)
    assert [one.design for one in await later.held()] == [getattr(held, "design", ""), "other"]


async def test_a_held_rejection_stays_one_with_its_reason(tmp_path: Path) -> None:
    Moods.mood = "replay"
    held, later = await handed_down(tmp_path, Policy(GOOD))
    Moods.mood, Moods.looked = "", 0
    rejected, _ = await later.answers(DesignRejected, DesignFailed, to=[ticket(attempts=1)])
    assert (rejected.rung, rejected.reason) == ("replay", "a slow day")
    assert rejected.source.strip() == COUNTER.strip()
    assert Moods.looked == 0
    assert [getattr(one, "valid", None) for one in held] == [False]


async def test_of_two_lives_at_once_each_fact_names_its_own_tokens(tmp_path: Path) -> None:
    """A life that was thought dead writes on: credit goes to the tokens of the fact that comes first."""
    other = COUNTER.replace("count from", "begin with")
    slow = Stage(tmp_path, Policy(f"```python\n{other}```", hints=("look down",)))
    fast = Stage(tmp_path, Policy(GOOD, hints=("look up",)))
    facts = []
    for stage in (slow, fast):
        ready = await stage.ready(ticket(attempts=1))
        (program,) = await stage.held()
        assert ready.sample == program.sample
        assert ready.finding == program.finding
        facts.append(ready)
    assert len({fact.sample for fact in facts}) == 2


def test_what_is_kept_for_the_checks_of_a_hint_is_bounded() -> None:
    end = StepResult("yes", 1.0, True, False)
    on = StepResult("no", 0.0, False, False)

    def episode(seed: int, policy: str, *actions: str) -> Episode:
        steps = (*[on] * (len(actions) - 1), end)
        return Episode(policy, seed, Transcript("x", actions, steps))

    long = [episode(0, "sweep", *(f"a{number}" for number in range(5000)), "x" * 5000)]
    plans = [episode(number, "solution", f"p{number}", "open") for number in range(99)]
    episodes = (*long, *plans, episode(99, "last action", "7"))
    found = ways_to_win(Verdict(ok=True, rung="accepted", episodes=episodes))
    assert len(found.actions) == 512
    assert max(map(len, found.actions)) < 10
    assert len(found.plans) == 16
    assert found.alone == ("7",)
    assert found.instances == 100
