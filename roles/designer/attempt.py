"""One design attempt, from the prompt to the verdict. Talks to an author and the sandbox, not to the bus."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from bus.messages import DesignSample, DesignTicket, Finding, WaysToWin
from engine.inference.segments import prompt_and_reply
from roles.designer.authors import Author, DesignReply
from roles.designer.corpus import Corpus, Document
from roles.designer.environment_pool import Programs
from roles.designer.prompt import VARIANTS, Brief, PromptWriter
from roles.designer.review import Commission, Review, published, ways_to_win
from roles.work_loop import sampling_seed
from sandbox import extract

if TYPE_CHECKING:
    from engine.config import DesignerConfig as DesignerConfig
    from engine.inference.tokens import ChatTokens
    from roles.designer.memory import DrawnExamples, Memory
    from sandbox import Validator

REFUSED = "refused"
"""The rung of an attempt that the author would not write."""


@dataclass(frozen=True)
class Asked:
    """The prompt of a design: the document's id and the ids of the tokens.

    Requests with the same ``key`` go to the same server.
    """

    document: str
    ids: Sequence[int]
    key: str


@dataclass(frozen=True)
class Draft:
    """The reply of an author with its prompt. ``source`` is a program that comes from a pool instead."""

    document: str
    reply: DesignReply
    prompt: str = ""
    source: str = ""

    @property
    def program(self) -> str:
        """The program in the reply, "" where there is none."""
        return self.source or extract(self.reply.visible)


@dataclass(frozen=True)
class Judged:
    """A draft, its program, and the published verdict on it."""

    draft: Draft
    source: str
    finding: Finding
    wins: WaysToWin = WaysToWin()  # noqa: RUF009 - frozen

    @property
    def valid(self) -> bool:
        return not self.finding.rung


class Workshop:
    """Gets drafts and judges them. The same ticket, attempt, memory and weights give the same draft."""

    def __init__(
        self,
        config: DesignerConfig,
        *,
        designer: Author | Programs,
        chat: ChatTokens,
        prompts: PromptWriter,
        corpus: Corpus,
        memory: Memory,
        review: Review,
        validator: Validator,
    ) -> None:
        self._config, self._designer, self._chat = config, designer, chat
        self._prompts, self._corpus, self._memory = prompts, corpus, memory
        self._review, self._validator = review, validator

    @property
    def trained(self) -> bool:
        """Return whether what is written here is given to the learner."""
        return self._designer.trained

    def statistics(self) -> dict[str, float]:
        """Those of the designer, under the name of its kind."""
        return {f"{self._config.kind}_{name}": value for name, value in self._designer.statistics().items()}

    async def ask(self, ticket: DesignTicket, attempt: int) -> Asked:
        """Return a prompt on the document of this attempt. Raises SpadeError when it does not fit.

        Tokens are counted in a thread: a prompt of a long context takes a good part of a second.
        """
        rng = random.Random(f"{ticket.seed}/{ticket.design}/{attempt}")
        document, drawn = self._corpus.draw(ticket, attempt), self._draw(ticket, rng)
        return await anyio.to_thread.run_sync(self._prompt, ticket, document, drawn)

    def asked(self, ticket: DesignTicket, held: DesignSample) -> Asked:
        """Return the prompt that published tokens of ``ticket`` were an answer to."""
        return Asked(held.document, prompt_and_reply(held.segments)[0], ticket.design)

    async def write(self, ticket: DesignTicket, attempt: int, shared: Asked | None = None) -> Draft:
        """Return an answer to ``shared``, the prompt of a group, or to a prompt of its own.

        Raises InferenceError.
        """
        if isinstance(self._designer, Programs):
            name, source = self._designer.draw(ticket.number, attempt, self._memory.programs())
            return Draft(name, DesignReply(source, "stop"), source=source)
        seed = sampling_seed(ticket.seed, ticket.design, attempt)
        asked = shared or await self.ask(ticket, attempt)
        reply = await self._designer.write(asked.ids, seed=seed, key=asked.key)
        return Draft(asked.document, reply, self._prompts.version)

    def recall(self, held: DesignSample) -> Judged:
        """Return the attempt that an earlier life of the ticket has already published, with its verdict."""
        draft = self._recalled(held)
        # Of a reply that was cut, all of it is told.
        source = draft.reply.text if draft.reply.finish == "length" else draft.program
        return Judged(draft, source, held.finding, held.wins)

    def _recalled(self, held: DesignSample) -> Draft:
        if isinstance(self._designer, Programs):
            return Draft(held.document, DesignReply(held.text, "stop"), source=held.text)
        if not held.segments:
            return Draft(held.document, DesignReply(held.text, "stop"), held.prompt)
        prompt, tokens = prompt_and_reply(held.segments)
        ended = bool(tokens) and tokens[-1] in set(self._chat.stop_token_ids)
        reply = DesignReply(
            self._chat.decode(tokens),
            "stop" if ended else "length",
            held.segments,
            thought_open=self._chat.opens_thought(prompt),
        )
        return Draft(held.document, reply, held.prompt)

    async def judge(self, ticket: DesignTicket, draft: Draft) -> Judged:
        """Extract the program and run it up the validator's ladder. Raises the sandbox's infra errors."""
        if draft.reply.refusal:
            return Judged(draft, "", Finding(rung=REFUSED, reason=draft.reply.refusal))
        if draft.reply.finish == "length":
            reason = "the reply was cut at its length limit"
            return Judged(draft, draft.reply.text, Finding(rung="extract", reason=reason))
        source = draft.program
        if not source.strip():
            thinks = draft.reply.text.strip() and not draft.reply.visible.strip()
            reason = "no program in the reply" + (", only reasoning" if thinks else "")
            return Judged(draft, source, Finding(rung="extract", reason=reason))
        if (repeated := await self._review.repeats(ticket.design, source)) is not None:
            return Judged(draft, source, repeated)
        verdict = await self._validator.validate(
            source, ticket=Commission(ticket, draft.document), max_turns=self._config.max_turns
        )
        return Judged(draft, source, published(verdict), ways_to_win(verdict))

    def _tokens(self, text: str) -> int:
        return len(self._chat.encode(text))

    def _draw(self, ticket: DesignTicket, rng: random.Random) -> DrawnExamples | None:
        config = self._config
        if not config.memory:
            return None
        return self._memory.draw(
            ticket.skill, positive=config.memory_positive, negative=config.memory_negative, rng=rng
        )

    def _prompt(self, ticket: DesignTicket, document: Document, drawn: DrawnExamples | None) -> Asked:
        document = self._corpus.cut(document)
        examples = drawn.views(self._tokens, self._config.memory_tokens) if drawn else []
        brief = Brief(
            skill=ticket.skill,
            document=document.text,
            target=ticket.target,
            memory=examples,
            variant=random.Random(f"{ticket.seed}/{ticket.design}/variant").choice(VARIANTS),
        )
        return Asked(document.id, self._prompts.design(brief), ticket.design)
