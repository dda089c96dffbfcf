"""Rules for ``[designer]`` that types cannot express: kinds of designer, designs per ticket."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from urllib.parse import urlsplit

from engine import registry
from engine.ablations import GAMES, PRESETS, TOOLS
from engine.config import Config, DesignerConfig, EndpointConfig
from engine.errors import Problem

_FREE = 64
"""Tokens that a prompt needs at least."""
_MISSPELT, _MISSPELT_LIST = 0.85, 0.75


def designers(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with ``designer.kind``, the table of that kind, and how a ticket is answered."""
    designer = config.designer
    asked = []
    if designer.kind == "external":
        asked.append(("designer.sampling", designer.sampling.max_tokens))
    if designer.hint_writer == "external":
        asked.append(("designer.hint_sampling", designer.hint_sampling.max_tokens))
    if designer.kind == "external" and designer.prompt == "nano":
        yield (
            "designer.prompt",
            'must be "full" or "tools": only a policy that is warm-started on it understands the nano prompt',
        )
    if asked:
        yield from _endpoint(designer.external, *max(asked, key=lambda one: one[1]))
    if designer.kind == "pool":
        yield from _pool(designer)
    if "frozen" in (designer.kind, designer.judge):
        yield from _frozen(config)
    yield from _groups(config)
    yield from _skills(designer)


def _skills(designer: DesignerConfig) -> Iterator[Problem]:
    """A name that is nearly one of ours is misspelt; a skill of the recipe's own may have any other."""
    described = {skill.name for skill in designer.custom_skills}
    ours = {name.casefold(): name for name in (*GAMES, *TOOLS)}
    for name in designer.skills:
        if name not in described and (lists := get_close_matches(name, PRESETS, 1, _MISSPELT_LIST)):
            yield "designer.skills", f"{name!r} is no skill; {lists[0]!r} stands alone, for a list of skills"
        near = get_close_matches(name.casefold(), ours, 1, _MISSPELT)
        if near and ours[near[0]] != name and name not in described:
            yield (
                "designer.skills",
                f"must say {ours[near[0]]!r}, not {name!r}; one of your own so called needs an entry in "
                "[[designer.custom_skills]]",
            )


def _endpoint(endpoint: EndpointConfig, sampling: str, reply: int) -> Iterator[Problem]:
    key = "designer.external"
    if not _is_url(endpoint.base_url):
        yield f"{key}.base_url", 'must start with "http://" or "https://", such as https://api.openai.com/v1'
    if not endpoint.model:
        yield f"{key}.model", "must name the model that the endpoint is to use"
    if endpoint.max_cost and not (endpoint.price_in or endpoint.price_out):
        yield f"{key}.max_cost", "needs price_in and price_out, or nothing that is bought costs anything"
    if endpoint.context_tokens < reply + _FREE:
        yield f"{key}.context_tokens", f"must leave room beside {sampling}.max_tokens = {reply}"


def _is_url(text: str) -> bool:
    """Return whether ``text`` is an HTTP URL with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _frozen(config: Config) -> Iterator[Problem]:
    frozen = config.designer.frozen
    if frozen.url and not _is_url(frozen.url):
        yield "designer.frozen.url", 'must start with "http://" or "https://"'
    if frozen.url and frozen.path:
        yield "designer.frozen.path", "is for a server started here; designer.frozen.url names a running one"
    if frozen.url and frozen.url in config.server.urls:
        yield "designer.frozen.url", "is among server.urls: the run would update it"
    taken = range(config.server.port, config.server.port + config.server.count)
    if frozen.port and (frozen.port == config.bus.port or (config.server.port and frozen.port in taken)):
        yield "designer.frozen.port", "is a port of bus.port or server.port too; 0 picks a free one"


def _pool(designer: DesignerConfig) -> Iterator[Problem]:
    if not registry.has_scheme(registry.POOLS, designer.pool.source):
        yield "designer.pool.source", f"must begin with {registry.schemes(registry.POOLS)}"
    if designer.designs_per_ticket > 1:
        yield "designer.designs_per_ticket", "must be 1: a pool has no prompt to share"


def _groups(config: Config) -> Iterator[Problem]:
    designer, plan, each = config.designer, config.curriculum, config.designer.designs_per_ticket
    rolling = plan.schedule == "rolling"
    size = plan.environments // plan.rounds_per_window if rolling else plan.environments
    if size % each:
        yield (
            "designer.designs_per_ticket",
            f"must divide the {size} designs of a cohort, or a group would be smaller than the others",
        )
    if each == 1 and designer.kind == "policy" and config.learner.designer.scope == "group":
        yield (
            "learner.designer.scope",
            'must not be "group" while designer.designs_per_ticket = 1: a design alone has no advantage; '
            'use "skill" or "global"',
        )
