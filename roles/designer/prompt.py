"""The two prompts of a designer as token ids, for a design and for its hint, and the skills in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine import prompts
from engine.errors import SpadeError
from roles.designer.corpus import cut

if TYPE_CHECKING:
    from engine.config import DesignerConfig
    from engine.inference.tokens import ChatTokens

_SMALLEST_DOCUMENT = 16
_MARK = "x"

DESCRIPTIONS: dict[str, str] = {
    "Mathematical Reasoning": "finding quantities by calculation, and using each result for the next",
    "Logical Deduction": "drawing what must follow from clues, and choosing the question that rules out most",
    "Spatial Reasoning": "keeping positions, directions and shapes in mind while they change",
    "Pattern Recognition": "discovering the rule behind what is shown, and foretelling what comes next",
    "Optimization": "finding the best choice under limits by trying, comparing and trading off",
    "Causal Inference": "finding out by intervention what brings about what",
    "API Orchestration": "combining calls of several services so that the result of one feeds the next",
    "Data Retrieval": "finding the one record that is meant, by filters and look-ups",
    "State Modification": "changing exactly what was asked for and leaving everything else as it is",
    "Error Recovery": "reading what went wrong in a call and reaching the goal in another way",
    "Tool Selection": "telling apart tools that look alike, and leaving out those that do not help",
    "Multi-Step Workflows": "keeping the order and the conditions of a long task",
}


# Kinds of tasks with tools, as often as the reference draws them (reference spec 2.4).
VARIANTS = (*["plain"] * 3, *["conditional"] * 2, "missing", "irrelevant")


def descriptions(config: DesignerConfig) -> dict[str, str]:
    """Return one line for each skill that has one; the recipe's descriptions replace the built-in ones."""
    own = {skill.name: skill.description for skill in config.custom_skills if skill.description}
    return {**DESCRIPTIONS, **own}


@dataclass(frozen=True)
class Brief:
    """The values of one design prompt.

    ``memory`` is a list of record views, best first; ``variant`` is the kind of task with tools.
    """

    skill: str
    document: str
    target: float
    memory: Sequence[dict[str, Any]] = ()
    variant: str = "plain"


class PromptWriter:
    """Renders briefs within ``context`` tokens less those of the reply; programs may import ``preload``."""

    def __init__(
        self,
        designer: DesignerConfig,
        chat: ChatTokens | PlainText,
        *,
        context: int,
        preload: Sequence[str],
    ) -> None:
        self.family = designer.prompt
        self._max_turns = designer.max_turns
        self._room = context - designer.sampling.max_tokens
        self._hint_room = context - designer.hint_sampling.max_tokens
        self._document = designer.corpus_tokens
        self._chat = chat
        self._descriptions = descriptions(designer)
        self._imports = prompts.imports(preload)

    @property
    def version(self) -> str:
        """The name and version of the design prompt, recorded with each design."""
        return prompts.version(f"design_{self.family}")

    def design(self, brief: Brief) -> list[int]:
        """Return the ids of the design prompt.

        A prompt that is too long loses memory examples first (from the last one), then halves of its document
        until it fits. Examples are measured beside a document of full length, so that another document, or
        none, gives the same examples. Raises SpadeError when the prompt does not fit without either.
        """
        memory, document = self._fitting(brief), brief.document
        while True:
            ids = self._render(brief, document, memory)
            if len(ids) <= self._room:
                return ids
            if memory and not document:
                memory.pop()
            elif document:
                keep = len(self._chat.encode(document)) // 2
                document = cut(document, keep, self._chat) if keep >= _SMALLEST_DOCUMENT else ""
            else:
                raise SpadeError(
                    f"the design prompt takes {len(ids)} tokens and {self._room} are left beside the reply",
                    where="designer.sampling.max_tokens, model.max_model_len",
                    remedy="allow a longer context or a shorter reply",
                )

    def _fitting(self, brief: Brief) -> list[dict[str, Any]]:
        """Return the examples that fit beside ``corpus_tokens`` of a document."""
        memory = list(brief.memory)
        if not memory:
            return memory
        section = len(self._render(brief, _MARK, [])) - len(self._render(brief, "", []))
        room = self._room - (section - len(self._chat.encode(_MARK))) - self._document
        while memory and len(self._render(brief, "", memory)) > room:
            memory.pop()
        return memory

    def hint(self, source: str) -> list[int] | None:
        """Return the ids of the hint prompt, None when the program is too long for it."""
        ids = list(self._chat.first(prompts.render(f"hint_{self.family}", source=source)))
        return ids if len(ids) <= self._hint_room else None

    def _render(self, brief: Brief, document: str, memory: list[dict[str, Any]]) -> list[int]:
        content = prompts.render(
            f"design_{self.family}",
            skill=brief.skill,
            document=document,
            target=brief.target,
            memory=memory,
            max_turns=self._max_turns,
            description=self._descriptions.get(brief.skill, ""),
            imports=self._imports,
            variant=brief.variant,
        )
        return list(self._chat.first(content))


class PlainText:
    """A chat format for prompts that are plain text: the ids of the text and nothing else."""

    def __init__(self, chat: ChatTokens) -> None:
        self._chat = chat
        self.stop_token_ids = chat.stop_token_ids

    def first(self, content: str) -> list[int]:
        """Return the ids of the content."""
        return self.encode(content)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return self._chat.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, none of which is a special token."""
        return self._chat.decode(ids)
