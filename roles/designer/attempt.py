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
from sandbox import REASON_CHARACTERS, extract

if TYPE_CHECKING:
    from engine.config import DesignerConfig
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
class Attempt:
    """One answer to a ticket: the author's reply, the program in it, and the published verdict on it."""

    document: str
    reply: DesignReply
    prompt: str
    source: str
    finding: Finding
    wins: WaysToWin

    @property
    def valid(self) -> bool:
        return not self.finding.rung


class Workshop:
    """Has programs written and judged.

    The same ticket, attempt, memory and weights give the same program.
    """

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
        config, drawn = self._config, None
        document = self._corpus.draw(ticket, attempt)
        if config.memory:
            drawn = self._memory.draw(
                ticket.skill,
                positive=config.memory_positive,
                negative=config.memory_negative,
                rng=random.Random(f"{ticket.seed}/{ticket.design}/{attempt}"),
            )
        return await anyio.to_thread.run_sync(self._prompt, ticket, document, drawn)

    async def attempt(self, ticket: DesignTicket, number: int, shared: Asked | None = None) -> Attempt:
        """Have a program written and run it up the validator's ladder.

        ``shared`` is the prompt of a group, else the attempt has a prompt of its own. Raises InferenceError
        and the sandbox's infra errors.
        """
        if isinstance(self._designer, Programs):
            document, source = self._designer.draw(ticket.number, number, self._memory.programs())
            reply, prompt = DesignReply(source, "stop"), ""
        else:
            asked = shared or await self.ask(ticket, number)
            seed = sampling_seed(ticket.seed, ticket.design, number)
            reply = await self._designer.write(asked.ids, seed=seed, key=asked.key)
            document, source, prompt = asked.document, _program(reply), self._prompts.version
        found, wins = _unusable(reply, source), WaysToWin()
        if found is None:
            found = await self._review.repeats(ticket.design, source)
        if found is None:
            verdict = await self._validator.validate(
                source, ticket=Commission(ticket, document), max_turns=self._config.max_turns
            )
            found, wins = published(verdict), ways_to_win(verdict)
        return Attempt(document, reply, prompt, source, found, wins)

    def recall(self, held: DesignSample) -> Attempt:
        """Return the attempt that an earlier life of the ticket has already published, with its verdict."""
        reply = DesignReply(held.text, "stop")
        if held.segments:
            prompt, tokens = prompt_and_reply(held.segments)
            ended = bool(tokens) and tokens[-1] in set(self._chat.stop_token_ids)
            reply = DesignReply(
                self._chat.decode(tokens),
                "stop" if ended else "length",
                held.segments,
                thought_open=self._chat.opens_thought(prompt),
            )
        source = held.text if isinstance(self._designer, Programs) else _program(reply)
        return Attempt(held.document, reply, held.prompt, source, held.finding, held.wins)

    def _prompt(self, ticket: DesignTicket, document: Document, drawn: DrawnExamples | None) -> Asked:
        document = self._corpus.cut(document)
        size, limit = (lambda text: len(self._chat.encode(text))), self._config.memory_tokens
        examples = drawn.views(size, limit) if drawn else []
        brief = Brief(
            skill=ticket.skill,
            document=document.text,
            target=ticket.target,
            memory=examples,
            variant=random.Random(f"{ticket.seed}/{ticket.design}/variant").choice(VARIANTS),
        )
        return Asked(document.id, self._prompts.design(brief), ticket.design)


def _program(reply: DesignReply) -> str:
    """Return the program in a reply, "" where there is none; of a reply that was cut, all of it."""
    return reply.text if reply.finish == "length" else extract(reply.visible)


def _unusable(reply: DesignReply, source: str) -> Finding | None:
    """Return the verdict on a reply that cannot be played, None when it can."""
    if reply.refusal:
        return Finding(rung=REFUSED, reason=reply.refusal[:REASON_CHARACTERS])
    if reply.finish == "length":
        return Finding(rung="extract", reason="the reply was cut at its length limit")
    if source.strip():
        return None
    thinks = reply.text.strip() and not reply.visible.strip()
    return Finding(rung="extract", reason="no program in the reply" + (", only reasoning" if thinks else ""))
