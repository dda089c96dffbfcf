"""One design attempt, from the prompt to the verdict. Talks to the pool and the sandbox, not to the bus."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bus.messages import DesignTicket, HeldDesign, Segment
from engine.inference.tokens import SegmentBuilder
from roles.designer.corpus import Corpus, Document
from roles.designer.prompt import Brief, PromptWriter
from roles.work import sampling_seed
from sandbox import extract

if TYPE_CHECKING:
    from engine.config import Designer as DesignerConfig
    from engine.inference.pool import InferencePool
    from engine.inference.tokens import ChatTokens
    from roles.designer.memory import Memory
    from sandbox import Validator, Verdict


@dataclass(frozen=True)
class Draft:
    """What the policy wrote: its reply as text, why it ended, its tokens, and what it was asked with."""

    document: str
    text: str
    finish: str
    segments: tuple[Segment, ...]
    prompt: str = ""


@dataclass(frozen=True)
class Judged:
    """A draft with its program. ``rung`` names the step that failed, "" when the program is valid."""

    draft: Draft
    source: str
    rung: str = ""
    reason: str = ""
    verdict: Verdict | None = None

    @property
    def valid(self) -> bool:
        return not self.rung


class Workshop:
    """Writes drafts and judges them. The same ticket, attempt, memory and weights give the same draft."""

    def __init__(
        self,
        config: DesignerConfig,
        *,
        pool: InferencePool,
        chat: ChatTokens,
        prompts: PromptWriter,
        corpus: Corpus,
        memory: Memory,
        validator: Validator,
    ) -> None:
        self._config, self._pool, self._chat = config, pool, chat
        self._prompts, self._corpus, self._memory = prompts, corpus, memory
        self._validator = validator

    async def write(self, ticket: DesignTicket, attempt: int) -> Draft:
        """Ask the policy for one program on a fresh document. Raises InferenceUnavailable."""
        rng = random.Random(f"{ticket.seed}/{ticket.design}/{attempt}")
        document = self._corpus.draw(ticket, attempt)
        prompt = self._prompts.design(self._brief(ticket, document, rng))
        completion = await self._pool.generate(
            prompt,
            sampling=self._config.sampling,
            seed=sampling_seed(ticket.seed, ticket.design, attempt),
            key=ticket.design,
            stop_token_ids=self._chat.stop_token_ids,
        )
        segments = SegmentBuilder()
        segments.prompt(prompt)
        segments.completion(completion)
        return Draft(
            document=document.id,
            text=self._chat.decode(completion.tokens),
            finish=completion.finish,
            segments=tuple(segments.segments()),
            prompt=self._prompts.version,
        )

    def recall(self, held: HeldDesign) -> Draft:
        """Return the draft behind tokens that an earlier life of the ticket has already published."""
        reply: list[int] = []
        for segment in held.segments:
            mask = np.frombuffer(segment.mask, np.uint8).astype(bool)
            reply += np.frombuffer(segment.tokens, "<i4")[mask].tolist()
        ended = bool(reply) and reply[-1] in set(self._chat.stop_token_ids)
        return Draft(
            document=held.document,
            text=self._chat.decode(reply),
            finish="stop" if ended else "length",
            segments=held.segments,
            prompt=held.prompt,
        )

    async def judge(self, draft: Draft) -> Judged:
        """Extract the program and run it up the validator's ladder. Raises the sandbox's infra errors."""
        if draft.finish == "length":
            return Judged(draft, draft.text, "extract", "the reply was cut at its length limit")
        source = extract(draft.text)
        if not source.strip():
            return Judged(draft, source, "extract", "no program in the reply")
        verdict = await self._validator.validate(source, max_turns=self._config.max_turns)
        if not verdict.ok:
            return Judged(draft, source, verdict.rung, verdict.reason, verdict)
        return Judged(draft, source, verdict=verdict)

    def _tokens(self, text: str) -> int:
        return len(self._chat.encode(text))

    def _brief(self, ticket: DesignTicket, document: Document, rng: random.Random) -> Brief:
        examples = (
            self._memory.examples(
                ticket.skill,
                positive=self._config.memory_positive,
                negative=self._config.memory_negative,
                rng=rng,
                tokens=self._tokens,
                limit=self._config.memory_tokens,
            )
            if self._config.memory
            else []
        )
        return Brief(skill=ticket.skill, document=document.text, target=ticket.target, memory=examples)
