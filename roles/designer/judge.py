"""The judge: a model's opinion on tool environments, the last rung of the ladder (reference spec 4.5).

It fails closed: a reply without a verdict is a refusal. A fault of the model's server is no verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from engine import prompts
from engine.errors import SpadeError
from engine.inference.completion import InferenceError
from roles.agent.actions import find_action
from roles.designer.authors import open_author
from roles.designer.prompt import PlainText
from roles.designer.review import digest
from roles.work_loop import sampling_seed
from sandbox import REASON_CHARACTERS, InfraFailure, Rejected

if TYPE_CHECKING:
    from engine.inference.endpoint import Endpoint
    from engine.inference.tokens import ChatTokens
    from roles.base import RoleContext
    from roles.designer.authors import Author
    from sandbox import Verdict

log = structlog.get_logger("spade.designer")


class ModelJudge:
    """Asks ``author`` in the chat format ``chat``; games are not judged."""

    def __init__(self, author: Author, chat: ChatTokens | PlainText) -> None:
        self._author, self._chat = author, chat
        self._counts = Counter(judge_asked=0, judge_refused=0, judge_silent=0)

    async def check(self, source: str, _: object, verdict: Verdict) -> Verdict:
        """Return the verdict of a program that is accepted. Raises Rejected, or InfraFailure."""
        if not verdict.tools:
            return verdict
        prompt = self._chat.first(prompts.render("judge_tools", source=source))
        name = digest(source)
        try:
            reply = await self._author.write(prompt, seed=sampling_seed("judge", name), key=name)
        except (InferenceError, SpadeError) as error:
            raise InfraFailure(f"the judge cannot be asked: {error}") from error
        said = (find_action(reply.visible) if reply.finish == "stop" else None) or ""
        word, _, reason = said.partition(":")
        known = word.strip().lower() in ("accept", "reject")
        accepted = word.strip().lower() == "accept"
        why = "" if accepted else (reason.strip() or "no reason given") if known else "it gave no verdict"
        self._counts.update(judge_asked=1, judge_refused=not accepted, judge_silent=not known)
        log.info("judge.verdict", environment=name, accepted=accepted, reason=why[:REASON_CHARACTERS])
        if not accepted:
            raise Rejected("judge", why)
        return verdict

    def statistics(self) -> dict[str, float]:
        """Return how often it was asked, refused, and gave no verdict (a refusal, too)."""
        return dict(self._counts)


@asynccontextmanager
async def open_judge(
    context: RoleContext, chat: ChatTokens, endpoint: Endpoint | None
) -> AsyncIterator[ModelJudge | None]:
    """Yield the judge of the recipe (``designer.judge``), None for none.

    Raises SpadeError when its server does not start.
    """
    kind, sampling = context.config.designer.judge, context.config.designer.judge_sampling
    if kind == "off":
        yield None
        return
    async with open_author("judge", kind, sampling, context, chat, endpoint) as author:
        yield ModelJudge(author, PlainText(chat) if kind == "external" else chat)
