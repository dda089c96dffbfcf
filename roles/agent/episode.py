"""The turn loop: one play of one instance to its end.

The loop knows neither the bus nor the policy: it is given an inference pool, a sandbox and the chat
format, and returns what happened. Both arms of a pair run through it with the same rules; they differ in
the hint of the first observation only (invariant I4). A program is told the turns that are played, where
its own budget is larger, and is built as the validator built it. The model sees token ids, never
re-tokenised text: contexts grow by appending (invariant I3).

Outcomes (architecture sections 5 and 8):

=====================================  ==========  ========  ==========================
what happened                          outcome     failure   return
=====================================  ==========  ========  ==========================
the program ended the play             terminated  none      last reward, clipped
the program cut the play               truncated   none      0
turns, context, reply or all replies   truncated   policy    0
too long
no action in the reply (in the box)    failed      policy    0
the program raised, hung, crashed, ... failed      env       0
=====================================  ==========  ========  ==========================

How long a play takes is no outcome: that depends on what else the servers do. What the policy can do to
make it long is bounded in tokens and turns, the same for both arms.

Infrastructure faults (server gone, sandbox gone) are not outcomes: they propagate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import msgspec

from bus.messages import (
    EpisodeFinished,
    EpisodeRequest,
    EpisodeSample,
    FailureKind,
    Outcome,
    Segment,
    ToolUse,
    Turn,
)
from engine import prompts
from engine.inference.replies import visible_reply
from engine.inference.tokens import SegmentBuilder
from roles.agent.actions import find_action, find_call
from roles.text_normalise import hint_names_action
from sandbox import REASON_CHARACTERS, EnvFailure, EnvProtocolError, EnvQuarantined, read_tools
from sandbox.tool_calls import Unreadable, parse

if TYPE_CHECKING:
    from engine.config import Config, SamplingConfig
    from engine.inference.pool import InferencePool
    from engine.inference.tokens import ChatTokens, Content
    from sandbox import Instance, SandboxPool, StepResult

_LONG_TEXT = 8192  # characters: from about five milliseconds on
_LONG_REPLY = 4096  # tokens: from about two milliseconds on

_Text = TypeVar("_Text")
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Rules:
    """Bounds of a play, and which plays are trained.

    ``context_tokens`` counts prompt and replies of one context, ``play_tokens`` all replies of the play (0:
    without a bound of its own); ``prompt`` names the template family. ``mask_truncated`` leaves a truncated
    play out of training, ``train_hinted`` trains hinted plays too. ``native`` plays tool environments in the
    format of the chat template, ``mask_malformed`` leaves replies out of training whose calls cannot be read.
    """

    sampling: SamplingConfig
    max_turns: int
    context_tokens: int
    prompt: str
    mask_truncated: bool = False
    play_tokens: int = 0
    train_hinted: bool = False
    native: bool = False
    mask_malformed: bool = False

    @classmethod
    def of(cls, config: Config) -> Rules:
        """Return the agent's rules in ``config``."""
        agent = config.agent
        return cls(
            sampling=agent.sampling,
            max_turns=agent.max_turns,
            context_tokens=min(agent.context_tokens, config.model.max_model_len),
            play_tokens=agent.play_tokens or agent.context_tokens,
            prompt=agent.prompt,
            mask_truncated=agent.truncated == "mask",
            train_hinted=config.learner.train_hinted,
            native=agent.tool_format == "native",
            mask_malformed=agent.malformed == "mask",
        )


class Ending(NamedTuple):
    """The reason why a play is over. ``returned`` is in [-1, 1]."""

    outcome: Outcome
    failure: FailureKind | None = None
    reason: str = ""
    returned: float = 0.0


@dataclass(frozen=True)
class Played:
    """One finished play. ``versions`` is the lowest and highest version that sampled a token.

    ``tokens`` were sampled, trained or not. ``tool_use`` is None for a game.
    """

    ending: Ending
    segments: tuple[Segment, ...]
    transcript: tuple[Turn, ...]
    seconds: float
    tokens: int = 0
    tool_use: ToolUse | None = None

    @property
    def versions(self) -> tuple[int, int] | None:
        seen = [span.version for segment in self.segments for span in segment.spans]
        return (min(seen), max(seen)) if seen else None

    def sample(self, request: EpisodeRequest, rules: Rules) -> EpisodeSample | None:
        """Return the tokens for the learner; None where they are not trained."""
        masked = rules.mask_truncated and self.ending.outcome == "truncated"
        if masked or not self.segments or (request.arm == "hinted" and not rules.train_hinted):
            return None
        return EpisodeSample(episode=request.episode, round=request.round, segments=self.segments)

    def finished(
        self, request: EpisodeRequest, sample: EpisodeSample | None, *, told: bool = True
    ) -> EpisodeFinished:
        """Return the fact for the bus; ``sample`` holds the tokens that were published before it.

        ``told``: it has the transcript.
        """
        hint = request.hint if request.arm == "hinted" and self.ending.returned > 0 else None
        return EpisodeFinished(
            episode=request.episode,
            design=request.design,
            arm=request.arm,
            round=request.round,
            index=request.index,
            returned=self.ending.returned,
            outcome=self.ending.outcome,
            failure=self.ending.failure,
            reason=self.ending.reason,
            turns=len(self.transcript),
            transcript=self.transcript if told else (),
            leaked=hint_names_action(hint, self.transcript),
            seconds=self.seconds,
            sample=sample.sample if sample else "",
            tokens=self.tokens,
            versions=self.versions,
            tool_use=self.tool_use,
        )


def terminal_return(reward: float) -> float:
    """Clip the last reward of a play that ended by itself to [-1, 1] (reference spec 3.4)."""
    return min(1.0, max(-1.0, reward)) if math.isfinite(reward) else 0.0


@dataclass
class _Context:
    """The context of the model (``segments``), and the texts behind it, in turn.

    ``seen`` is the last observation. ``tools`` are those that the chat template shows.
    """

    segments: SegmentBuilder = field(default_factory=SegmentBuilder)
    messages: list[Content] = field(default_factory=list)
    seen: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    used: ToolUse | None = None
    last_token: int = -1
    sampled: int = 0
    transcript: list[Turn] = field(default_factory=list)


class _Reply(NamedTuple):
    """The text of a completion and why it ended; ``thought_open``: its prompt ended inside a thought."""

    text: str
    finish: str
    thought_open: bool


class Player:
    """Plays episodes against one inference pool and one sandbox. Holds nothing of a play after it.

    ``playing`` are the episodes played now, which are also the keys of their requests; ``stepping`` is how
    many of them are in a step of their program, ``replies`` how many replies were had so far.
    """

    def __init__(self, pool: InferencePool, sandbox: SandboxPool, chat: ChatTokens, rules: Rules) -> None:
        self._pool, self._sandbox, self._chat, self.rules = pool, sandbox, chat, rules
        self.playing: set[str] = set()
        self.stepping = self.replies = 0

    async def play(self, request: EpisodeRequest, seconds: float = math.inf) -> Played:
        """Play ``request`` to its end.

        Raises TimeoutError when there is no reply and no step for ``seconds``, the infrastructure errors of
        the pool and of the sandbox (``InferenceError``, ``InfraFailure``), and ``EnvQuarantined``. Every
        other fault is an outcome.
        """
        started, context = time.monotonic(), _Context()
        instance: Instance | None = None
        self.playing.add(request.episode)
        with anyio.move_on_after(seconds) as patience:

            def progress() -> None:
                patience.deadline = anyio.current_time() + seconds

            try:
                instance = await self._sandbox.spawn(
                    request.source,
                    seed=request.seed,
                    kwargs={"max_turns": self._turn_budget(request)},
                )
                progress()
                await self._open(request, instance, context)
                ending = await self._turns(request, instance, context, progress)
            except EnvQuarantined:
                raise
            except EnvFailure as error:
                ending = _env_failure(error)
            finally:
                self.playing.discard(request.episode)
                if instance is not None:
                    await instance.close()
            return Played(
                ending=ending,
                segments=context.segments.segments(),
                transcript=tuple(context.transcript),
                seconds=time.monotonic() - started,
                tokens=context.sampled,
                tool_use=context.used,
            )
        raise TimeoutError(f"no reply and no step for {seconds:g} s")

    def _turn_budget(self, request: EpisodeRequest) -> int:
        return min(request.max_turns, self.rules.max_turns)

    async def _open(self, request: EpisodeRequest, instance: Instance, context: _Context) -> None:
        """Begin ``context`` with the first observation, and the hint in the hinted arm."""
        hint = request.hint if request.arm == "hinted" else None
        observation, tools, prompt = instance.first, [], self.rules.prompt
        if instance.tools and self.rules.native:
            tools, prompt = read_tools(await instance.call("get_tools")), "native"
            observation = "\n".join(text for _, text in await _said(instance))
        content = prompts.render(f"play_{prompt}", observation=observation, hint=hint)
        context.segments.prompt(await _encoded(partial(self._chat.first, tools=tools), content))
        context.messages, context.seen, context.tools = [content], content, tools
        context.used = ToolUse() if instance.tools else None

    async def _turns(
        self, request: EpisodeRequest, instance: Instance, context: _Context, progress: Callable[[], None]
    ) -> Ending:
        for turn in range(self._turn_budget(request)):
            if turn:
                await self._append(context)
            room = self.rules.context_tokens - len(context.segments)
            if room <= 0:
                if turn == 0:
                    return Ending("failed", "env", "the first observation does not fit the context")
                return Ending("truncated", "policy", "context full")
            if self.rules.play_tokens:
                room = min(room, self.rules.play_tokens - context.sampled)
                if room <= 0:
                    return Ending("truncated", "policy", "token budget spent")
            reply = await self._reply(request, turn, context, room)
            progress()
            ending = await self._act(instance, context, reply)
            progress()
            if ending is not None:
                return ending
        return Ending("truncated", "policy", "turn budget spent")

    async def _reply(self, request: EpisodeRequest, turn: int, context: _Context, room: int) -> _Reply:
        sampling = self.rules.sampling
        if sampling.max_tokens > room:
            sampling = msgspec.structs.replace(sampling, max_tokens=room)
        prompt = context.segments.context
        completion = await self._pool.generate(
            prompt,
            sampling=sampling,
            key=request.episode,
            stop_token_ids=self._chat.stop_token_ids,
            experts_from=context.segments.routed,
        )
        self.replies += 1
        context.segments.completion(completion)
        context.sampled += len(completion.tokens)
        context.last_token = completion.tokens[-1] if completion.tokens else -1
        long = len(completion.tokens) > _LONG_REPLY
        text = await _apart(self._chat.decode, completion.tokens, long=long)
        return _Reply(text, completion.finish, self._chat.opens_thought(prompt))

    async def _act(self, instance: Instance, context: _Context, answer: _Reply) -> Ending | None:
        """Carry out ``answer``; return the ending, or None when the play goes on."""
        seen, reply = context.seen, answer.text
        action = None
        if answer.finish != "length":
            find = self._finder(instance, context, thought_open=answer.thought_open)
            action = await _apart(find, reply, long=len(reply) > _LONG_TEXT)
        if action is None:
            context.transcript.append(Turn(seen, reply, "", 0.0))
            if answer.finish == "length":
                return Ending("truncated", "policy", "reply cut at its length limit")
            return Ending("failed", "policy", "no action in the reply")
        self.stepping += 1
        try:
            result = await instance.step(action)
            said = await _said(instance) if context.tools and not result.done else result.observation
        except EnvFailure as error:
            context.transcript.append(Turn(seen, reply, action, 0.0))
            return _env_failure(error)
        finally:
            self.stepping -= 1
        if context.used is not None:
            before, context.used = context.used, _counted(context.used, action, result)
            if self.rules.mask_malformed and context.used.malformed > before.malformed:
                context.segments.withdraw()
        context.transcript.append(Turn(seen, reply, action, result.reward))
        if result.terminated:
            return Ending("terminated", returned=terminal_return(result.reward))
        if result.truncated:
            return Ending("truncated", None, "the environment cut the play")
        context.messages += [reply, said]
        context.seen = result.observation
        return None

    def _finder(
        self, instance: Instance, context: _Context, *, thought_open: bool
    ) -> Callable[[str], str | None]:
        """Return what finds the action in a reply; with tools of the chat template it finds one in any."""
        if not context.tools:
            return partial(find_call if instance.tools else find_action, thought_open=thought_open)
        calls = self._chat.tool_style.calls
        return lambda reply: calls.action(
            visible_reply(reply, thought_open=thought_open), context.tools, reply
        )

    async def _append(self, context: _Context) -> None:
        bridge = await _encoded(self._chat.bridge, context.messages[-1])
        if bridge is None:
            # The template rewrites history: what the model sees next may not be adjacent to what it saw.
            render = partial(self._chat.render, tools=context.tools)
            ids, known = await _encoded(render, context.messages), context.segments.context
            if context.tools and ids[: len(known)] == known:
                context.segments.prompt(ids[len(known) :])
            else:
                context.segments.rewrite(ids)
            return
        close = self._chat.close()
        if context.last_token not in close:
            # The reply ended with another stop token than the one the template ends a turn with.
            context.segments.prompt(close)
        context.segments.prompt(bridge)


async def _encoded(encode: Callable[[_Text], _Made], text: _Text) -> _Made:
    """Return ``encode(text)``."""
    size = len(text) if isinstance(text, str) else len(str(text))
    return await _apart(encode, text, long=size > _LONG_TEXT)


async def _apart(make: Callable[[_Given], _Made], given: _Given, *, long: bool) -> _Made:
    """Return ``make(given)``; where that takes ``long`` it is done in a thread, and other plays go on."""
    return await anyio.to_thread.run_sync(make, given) if long else make(given)


async def _said(instance: Instance) -> list[tuple[str, str]]:
    """Return the last observation of a tool environment as a chat. Raises EnvFailure."""
    try:
        said = msgspec.convert(await instance.call("messages"), list[tuple[Literal["tool", "user"], str]])
    except msgspec.ValidationError as error:
        raise EnvProtocolError(f"messages() did not return messages: {str(error)[:200]}") from None
    if not said:
        raise EnvProtocolError("messages() is empty")
    return [(role, text) for role, text in said]


def _counted(used: ToolUse, action: str, result: StepResult) -> ToolUse:
    """Return ``used`` with one more turn."""
    done, of = result.instructions or (0, 0)
    try:
        calls, malformed = len(parse(action).calls), 0
    except Unreadable:
        calls, malformed = 0, 1
    return ToolUse(used.calls + calls, used.malformed + malformed, done, of)


def _env_failure(error: EnvFailure) -> Ending:
    return Ending("failed", "env", f"{type(error).__name__}: {error}"[:REASON_CHARACTERS])
