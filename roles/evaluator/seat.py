"""The seats at one model: conversations and environments, by the pool, sandbox and turn loop of training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_process
import anyio.to_thread
import msgspec

from bus.messages import EpisodeRequest
from engine.config import SamplingConfig
from engine.evals.suite import Content, Outcome, Program, Reply
from engine.evals.text_policies import TextPool
from engine.inference.replies import visible_reply
from engine.native_calls import Tools
from roles.agent.actions import find_action
from roles.agent.episode import Player, Rules
from sandbox import SandboxPool
from sandbox.tool_calls import Unreadable

Result = TypeVar("Result")
_USER = SamplingConfig(temperature=0.0, max_tokens=2048)


class Table:
    """One model: ``pool`` and ``chat`` of a run, of a frozen server, or a player of texts.

    An environment that neither answers nor is answered for ``seconds`` is a fault. ``workers`` bounds the
    processes of judges. ``user`` plays the simulated users, by default the model itself.
    """

    def __init__(
        self,
        pool: Any,
        chat: Any,
        sandbox: SandboxPool,
        rules: Rules,
        *,
        seconds: float,
        workers: anyio.CapacityLimiter | None = None,
        user: Table | None = None,
    ) -> None:
        self.pool, self.chat, self.sandbox, self.rules = pool, chat, sandbox, rules
        self.seconds = seconds
        self.workers = workers or anyio.CapacityLimiter(2)
        self.user = user or self

    def seat(self, key: str, sampling: SamplingConfig) -> Seat:
        """Return a fresh seat."""
        return Seat(self, key, sampling)


class Seat:
    """The place of one sample."""

    def __init__(self, table: Table, key: str, sampling: SamplingConfig) -> None:
        self._table, self.key = table, key
        self.sandbox = table.sandbox
        self._sampling = sampling
        self.asked: list[tuple[str, str]] = []
        self._tokens = 0
        self._seen: list[int] = []

    @property
    def tokens(self) -> int:
        pool = self._table.pool
        return pool.counted[self.key] if isinstance(pool, TextPool) else self._tokens

    @property
    def versions(self) -> tuple[int, int] | None:
        return (min(self._seen), max(self._seen)) if self._seen else None

    async def ask(
        self, messages: Sequence[Content], *, system: str | None = None, tools: Tools = ()
    ) -> Reply:
        table, seen = self._table, _text(messages[-1])
        prompt = await anyio.to_thread.run_sync(
            partial(table.chat.render, **({"tools": tools} if tools else {})), list(messages), system
        )
        room = table.rules.context_tokens - len(prompt)
        if room <= 0:
            self.asked.append((seen, ""))
            return Reply("", None, True)
        sampling = msgspec.structs.replace(self._sampling, max_tokens=min(room, self._sampling.max_tokens))
        completion = await table.pool.generate(
            prompt,
            sampling=sampling,
            key=self.key,
            stop_token_ids=table.chat.stop_token_ids,
        )
        self._tokens += len(completion.tokens)
        self._seen += [span.version for span in completion.spans]
        text = await anyio.to_thread.run_sync(table.chat.decode, completion.tokens)
        self.asked.append((seen, text))
        shown = visible_reply(text, thought_open=table.chat.opens_thought(prompt))
        calls: list[dict[str, Any]] = []
        fault = ""
        if tools:
            try:
                calls = table.chat.tool_style.calls.calls(shown, tools, text)
            except Unreadable as error:
                fault = str(error)
        return Reply(shown, find_action(shown), completion.finish == "length", text, tuple(calls), fault)

    def other(self) -> Seat:
        return Seat(self._table.user, f"{self.key}/user", _USER)

    async def play(self, program: Program) -> Outcome:
        table = self._table
        rules = replace(table.rules, sampling=self._sampling)
        request = EpisodeRequest(
            episode=self.key,
            design="",
            environment=hashlib.sha256(program.source.encode()).hexdigest(),
            arm="plain",
            round=0,
            index=0,
            seed=program.seed,
            source=program.source,
            hint=None,
            max_turns=program.max_turns,
        )
        player = Player(table.pool, table.sandbox, table.chat, rules)
        played = await player.play(request, table.seconds)
        self.asked += [(turn.observation, turn.reply) for turn in played.transcript]
        self._tokens += played.tokens
        self._seen += played.versions or ()
        return Outcome(
            score=played.ending.returned,
            reason=played.ending.reason,
            detail={"outcome": played.ending.outcome, "turns": len(played.transcript)},
        )

    async def work(self, function: Callable[..., Result], *arguments: Any, seconds: float) -> Result:
        async def once() -> Result:
            return await anyio.to_process.run_sync(
                function, *arguments, cancellable=True, limiter=self._table.workers
            )

        with anyio.fail_after(seconds):
            try:
                return await once()
            except anyio.BrokenWorkerProcess:  # an idle one that has ended since
                return await once()


def _text(turn: Content) -> str:
    return turn if isinstance(turn, str) else "\n".join(text for _, text in turn)
