"""The privileged hint: written in a call of its own, on the accepted program (reference spec 2.7)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from roles.work import sampling_seed

if TYPE_CHECKING:
    from engine.config import Sampling
    from engine.inference.pool import InferencePool
    from engine.inference.tokens import ChatTokens
    from roles.designer.prompt import PromptWriter

LONGEST_HINT = 800
_THINK_END = "</think>"
_LABEL = re.compile(r"^\s*hint\s*:\s*", re.IGNORECASE)


def clean_hint(text: str, finish: str) -> str | None:
    r"""Return the hint in a reply as one line, None when it is not acceptable.

    Refused are a reply that was cut, an empty one, one longer than LONGEST_HINT characters, and one with
    a ``\boxed`` group, which would be an action and not advice. Reasoning before the last closing think
    tag is not part of the hint.
    """
    if finish != "stop":
        return None
    line = _LABEL.sub("", " ".join(text.rpartition(_THINK_END)[2].split()))
    if not line or len(line) > LONGEST_HINT or "\\boxed" in line:
        return None
    return line


class HintWriter:
    """Asks the current policy for a hint, up to ``attempts`` times. Its tokens are never trained."""

    def __init__(
        self,
        pool: InferencePool,
        chat: ChatTokens,
        prompts: PromptWriter,
        sampling: Sampling,
        attempts: int,
    ) -> None:
        self._pool, self._chat, self._prompts = pool, chat, prompts
        self._sampling, self._attempts = sampling, attempts

    async def write(self, source: str, *, design: str, attempt: int) -> str | None:
        """Return an acceptable hint for ``source`` or None. Raises InferenceUnavailable."""
        prompt = self._prompts.hint(source)
        if prompt is None:
            return None
        for trial in range(self._attempts):
            completion = await self._pool.generate(
                prompt,
                sampling=self._sampling,
                seed=sampling_seed(design, attempt, "hint", trial),
                key=design,
                stop_token_ids=self._chat.stop_token_ids,
            )
            hint = clean_hint(self._chat.decode(completion.tokens), completion.finish)
            if hint is not None:
                return hint
        return None
