"""The turn loop: paired arms, outcomes, budgets, and what the segments say."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import msgspec
import pytest
from role_fakes import COUNTER, OTHER_STOP, STOP, USER, FakeChat, FakePool, FakeSandbox
from scenes.small_run import request

from bus.messages import EpisodeRequest, Segment
from engine.config import SamplingConfig
from engine.inference.completion import InferenceUnavailable
from engine.lineage import Version
from engine.training import samples
from roles.agent import episode
from roles.agent.actions import find_action
from roles.agent.episode import Ending, Player, Rules, terminal_return
from sandbox import EnvCrashed, EnvMemory, EnvQuarantined, EnvTimeout, EnvViolation, SandboxUnavailable

HINT = "say the start, then one more each turn"


def make_request(**fields: Any) -> EpisodeRequest:
    mine = {"episode": "ep1", "environment": "e1", "seed": 7, "source": COUNTER, "max_turns": 10}
    return request(0, **(mine | fields))


def rules(**fields: Any) -> Rules:
    values: dict[str, Any] = {
        "sampling": SamplingConfig(max_tokens=64),
        "max_turns": 10,
        "context_tokens": 8192,
        "prompt": "full",
        **fields,
    }
    return Rules(**values)


def counting(_: str, call: int) -> str:
    return f"I say \\boxed{{{2 + call}}}"


def make_player(
    script: Any = counting, *, sandbox: FakeSandbox | None = None, chat: FakeChat | None = None, **fields: Any
):
    pool = FakePool(script, version=Version(0, 4).pack())
    return Player(pool, sandbox or FakeSandbox(), chat or FakeChat(), rules(**fields)), pool


def arrays(segment: Segment) -> tuple[list[int], list[int], list[float]]:
    tokens, mask, logprobs = samples.arrays(segment)
    return tokens.tolist(), mask.astype(int).tolist(), logprobs.tolist()


def wordy(_: str, call: int) -> str:
    return "hm " * 10 + f"\\boxed{{{2 + call}}}"


@pytest.mark.parametrize("arm", ["plain", "hinted"])
async def test_what_the_policy_may_say_in_a_play_is_bounded(arm: Any) -> None:
    """Each reply has 40 tokens and is forgotten by the template: the context never fills up."""
    each = len(wordy("", 0)) + 1
    player, pool = make_player(wordy, chat=FakeChat(rewrites=True), play_tokens=2 * each + 5)
    played = await player.play(make_request(arm=arm, hint=HINT if arm == "hinted" else None))
    assert [call["sampling"].max_tokens for call in pool.calls] == [64, each + 5, 5]
    assert played.ending == Ending("truncated", "policy", "reply cut at its length limit")
    assert sum(arrays(segment)[1].count(1) for segment in played.segments) == 2 * each + 5
    sample = played.sample(make_request(), rules())
    assert sample is not None
    assert sample.segments == played.segments, "it stays, with its value"
    player, pool = make_player(wordy, chat=FakeChat(rewrites=True), play_tokens=2 * each)
    played = await player.play(make_request(arm=arm, hint=HINT if arm == "hinted" else None))
    assert played.ending == Ending("truncated", "policy", "token budget spent")
    assert len(pool.calls) == 2


async def test_a_box_in_a_thought_that_the_template_opened_is_not_played() -> None:
    class Thinking(FakeChat):
        def opens_thought(self, prompt: Any) -> bool:
            return True

    replies = ["2? No.</think>\\boxed{2}", "It may be \\boxed{3}"]
    player, _ = make_player(lambda _, call: replies[call], chat=Thinking())
    played = await player.play(make_request())
    assert played.ending == Ending("failed", "policy", "no action in the reply")
    assert [turn.action for turn in played.transcript] == ["2", ""]


async def test_a_play_that_is_won() -> None:
    sandbox = FakeSandbox()
    player, pool = make_player(sandbox=sandbox)
    played = await player.play(make_request())
    assert played.ending == ("terminated", None, "", 1.0)
    assert [turn.action for turn in played.transcript] == ["2", "3", "4"]
    assert [turn.reward for turn in played.transcript] == [0.0, 0.0, 1.0]
    assert [turn.observation for turn in played.transcript][1:] == ["turn 1", "turn 2"]
    assert "count from 2" in played.transcript[0].observation
    assert played.versions == (Version(0, 4).pack(),) * 2
    assert [instance.closed for instance in sandbox.instances] == [True]
    assert {call["key"] for call in pool.calls} == {"ep1"}


async def test_the_segment_is_what_the_model_saw_and_said() -> None:
    player, pool = make_player()
    played = await player.play(make_request())
    (segment,) = played.segments
    tokens, mask, logprobs = arrays(segment)
    last = pool.calls[-1]["prompt"]
    assert tokens[: len(last)] == last
    for call, turn in zip(pool.calls, played.transcript, strict=True):
        start = len(call["prompt"])
        reply = [*FakeChat().encode(turn.reply), STOP]
        assert tokens[: start + len(reply)] == call["prompt"] + reply
        assert mask[start : start + len(reply)] == [1] * len(reply)
    assert sum(mask) == sum(len(turn.reply) + 1 for turn in played.transcript)
    assert all((value == -0.25) == bool(masked) for value, masked in zip(logprobs, mask, strict=True))
    covered = [position for span in segment.spans for position in range(span.start, span.stop)]
    assert covered == [position for position, masked in enumerate(mask) if masked]
    assert mask[-1] == 1


async def test_a_plain_play_never_shows_the_hint_of_its_request() -> None:
    player, pool = make_player()
    await player.play(make_request(arm="plain", hint=HINT))
    reference, calls = make_player()
    await reference.play(make_request())
    assert [call["prompt"] for call in pool.calls] == [call["prompt"] for call in calls.calls]


async def test_a_template_that_rewrites_history_opens_segments() -> None:
    player, pool = make_player(chat=FakeChat(rewrites=True))
    played = await player.play(make_request())
    assert played.ending.returned == 1.0
    assert len(played.segments) == 3
    for segment, call, turn in zip(played.segments, pool.calls, played.transcript, strict=True):
        tokens, mask, _ = arrays(segment)
        reply = [*FakeChat().encode(turn.reply), STOP]
        assert tokens == call["prompt"] + reply
        assert mask == [0] * len(call["prompt"]) + [1] * len(reply)
    assert pool.calls[2]["prompt"].count(USER) == 3


@pytest.mark.parametrize("rewrites", [False, True])
async def test_the_experts_of_each_token_travel_with_it(rewrites: bool) -> None:
    """Each is asked for once: after the first turn of a context those that are known are left out."""
    player, pool = make_player(chat=FakeChat(rewrites=rewrites))
    pool.routed = True
    played = await player.play(make_request())
    assert len(played.segments) == (len(pool.calls) if rewrites else 1)
    assert len(pool.calls) > 1
    routes = samples.Routes(layers=1, top_k=1, experts=8)
    for segment in played.segments:
        tokens = samples.arrays(segment).tokens
        assert routes.read(segment)[:, 0, 0].tolist() == [*(tokens[:-1] % 8).tolist(), -1]


async def test_a_turn_that_another_stop_token_ended_is_closed_as_the_template_does() -> None:
    player, pool = make_player()
    pool.stop = OTHER_STOP
    played = await player.play(make_request())
    start, reply = len(pool.calls[0]["prompt"]), len(played.transcript[0].reply)
    assert pool.calls[1]["prompt"][start + reply : start + reply + 3] == [OTHER_STOP, STOP, USER]
    _, mask, _ = arrays(played.segments[0])
    assert mask[start + reply : start + reply + 3] == [1, 0, 0]


@pytest.mark.parametrize(
    ("script", "fields", "ending"),
    [
        (lambda *_: "no idea", {}, ("failed", "policy", "no action in the reply", 0.0)),
        (lambda *_: "\\boxed{2", {}, ("failed", "policy", "no action in the reply", 0.0)),
        (lambda *_: "\\boxed{x}", {}, ("failed", "env")),
        (lambda *_: "\\boxed{9}", {}, ("terminated", None, "", 0.0)),
        (
            lambda *_: "x" * 70 + "\\boxed{2}",
            {},
            ("truncated", "policy", "reply cut at its length limit", 0.0),
        ),
        (counting, {"max_turns": 2}, ("truncated", "policy", "turn budget spent", 0.0)),
        (counting, {"context_tokens": 10}, ("failed", "env")),
    ],
)
async def test_endings(script: Any, fields: dict[str, Any], ending: tuple[Any, ...]) -> None:
    sandbox = FakeSandbox()
    player, _ = make_player(script, sandbox=sandbox, **fields)
    played = await player.play(make_request())
    assert tuple(played.ending)[: len(ending)] == ending
    assert played.ending.returned == 0.0
    assert sandbox.instances[-1].closed


async def test_the_request_bounds_the_turns_too() -> None:
    player, pool = make_player()
    played = await player.play(make_request(max_turns=1))
    assert played.ending.reason == "turn budget spent"
    assert len(pool.calls) == 1


async def test_context_runs_out_in_the_middle() -> None:
    probe, seen = make_player()
    await probe.play(make_request())
    second = len(seen.calls[1]["prompt"])
    player, pool = make_player(context_tokens=second)
    played = await player.play(make_request())
    assert played.ending == ("truncated", "policy", "context full", 0.0)
    assert len(played.transcript) == 1
    assert len(pool.calls) == 1
    _, mask, _ = arrays(played.segments[0])
    assert mask[-1] == 1
    player, pool = make_player(context_tokens=second + 5)
    played = await player.play(make_request())
    assert played.ending.reason == "reply cut at its length limit"
    assert pool.calls[1]["sampling"].max_tokens == 5


async def test_a_long_reply_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[tuple[str, bool]] = []

    def note(what: str) -> None:
        threads.append((what, threading.current_thread() is threading.main_thread()))

    class Chat(FakeChat):
        def decode(self, ids: Any) -> str:
            note("decode")
            return super().decode(ids)

    def find(reply: str, *, thought_open: bool) -> str | None:
        note("find")
        return find_action(reply, thought_open=thought_open)

    monkeypatch.setattr(episode, "find_action", find)
    player, _ = make_player(
        lambda text, call: ("x" * 9000 if call else "") + counting(text, call),
        chat=Chat(),
        sampling=SamplingConfig(max_tokens=10_000),
        context_tokens=30_000,
        max_turns=2,
    )
    played = await player.play(make_request())
    assert [turn.action for turn in played.transcript] == ["2", "3"]
    assert threads == [("decode", True), ("find", True), ("decode", False), ("find", False)]


async def test_a_long_text_is_encoded_beside_the_loop() -> None:
    class Chat(FakeChat):
        threads: ClassVar[list[bool]] = []

        def encode(self, text: str) -> list[int]:
            self.threads.append(threading.current_thread() is threading.main_thread())
            return super().encode(text)

    reset, step = (
        "def reset(self, seed): return 'go'",
        "def step(self, a): return 'x' * 60_000, 0.0, False, False, {}",
    )
    player, pool = make_player(chat=Chat(), context_tokens=30_000)
    played = await player.play(make_request(source=f"class AEnv:\n {reset}\n {step}"))
    assert played.ending == ("truncated", "policy", "context full", 0.0)
    assert Chat.threads == [True, False]
    assert len(pool.calls) == 1
    (segment,) = played.segments
    assert len(segment.tokens) // 4 < 1000, "what was not sampled after is not sent"


async def test_an_environment_that_cuts_the_play_is_no_failure() -> None:
    reset, step = "def reset(self, seed): return 'go'", "def step(self, a): return 'x', 1.0, False, True, {}"
    source = f"class AEnv:\n {reset}\n {step}"
    player, _ = make_player()
    played = await player.play(make_request(source=source))
    assert tuple(played.ending)[:2] == ("truncated", None)
    assert played.ending.returned == 0.0


@pytest.mark.parametrize("source", ["class AEnv:\n def reset(self, seed): return 1 / 0", "syntax error here"])
async def test_a_program_that_does_not_start_has_a_defined_value(source: str) -> None:
    player, pool = make_player()
    played = await player.play(make_request(source=source))
    assert tuple(played.ending)[:2] == ("failed", "env")
    assert (played.segments, played.transcript, played.versions, pool.calls) == ((), (), None, [])


@pytest.mark.parametrize(
    "fault",
    [EnvTimeout("cpu", 2.0), EnvCrashed(signal=9), EnvViolation("x"), EnvMemory("x")],
    ids=lambda fault: type(fault).__name__,
)
async def test_what_the_program_does_is_its_outcome(fault: Exception) -> None:
    sandbox = FakeSandbox()
    sandbox.faults.append(fault)
    player, _ = make_player(sandbox=sandbox)
    played = await player.play(make_request())
    assert tuple(played.ending)[:2] == ("failed", "env")
    assert type(fault).__name__ in played.ending.reason


@pytest.mark.parametrize("fault", [SandboxUnavailable("gone"), EnvQuarantined("strikes")])
async def test_infrastructure_and_quarantine_are_no_outcome(fault: Exception) -> None:
    sandbox = FakeSandbox()
    sandbox.faults.append(fault)
    player, _ = make_player(sandbox=sandbox)
    with pytest.raises(type(fault)):
        await player.play(make_request())


async def test_an_inference_fault_closes_the_instance() -> None:
    sandbox = FakeSandbox()
    player, _ = make_player(lambda *_: InferenceUnavailable("gone"), sandbox=sandbox)
    with pytest.raises(InferenceUnavailable):
        await player.play(make_request())
    assert sandbox.instances[0].closed


async def test_the_fact_names_the_tokens_that_were_stored_before_it() -> None:
    player, _ = make_player()
    request = make_request()
    played = await player.play(request)
    sample = played.sample(request, player.rules)
    assert sample is not None
    assert (sample.episode, sample.round, sample.segments) == (
        request.episode,
        request.round,
        played.segments,
    )
    fact = played.finished(request, sample)
    assert (fact.returned, fact.outcome, fact.turns) == (1.0, "terminated", 3)
    assert (fact.sample, fact.tokens) == (sample.sample, played.tokens)
    assert fact.versions == (Version(0, 4).pack(),) * 2
    again = msgspec.structs.replace(sample, segments=sample.segments * 2)
    assert again.sample != sample.sample, "another play of the same episode has other tokens"


@pytest.mark.parametrize(
    ("arm", "masks", "hinted", "turns", "stored"),
    [
        ("plain", True, False, 2, False),
        ("plain", False, False, 2, True),
        ("plain", True, False, 3, True),
        ("hinted", False, False, 3, False),
        ("hinted", False, True, 3, True),
    ],
)
async def test_tokens_that_are_not_trained_are_not_stored(
    arm: Any, masks: bool, hinted: bool, turns: int, stored: bool
) -> None:
    player, _ = make_player(max_turns=turns, mask_truncated=masks, train_hinted=hinted)
    request = make_request(arm=arm, hint=HINT if arm == "hinted" else None)
    played = await player.play(request)
    sample = played.sample(request, player.rules)
    assert (sample is not None) == stored
    fact = played.finished(request, sample)
    assert bool(fact.sample) == stored
    assert fact.tokens == played.tokens > 0


@pytest.mark.parametrize(("reward", "value"), [(0.3, 0.3), (7.0, 1.0), (-3.0, -1.0), (float("nan"), 0.0)])
def test_terminal_return(reward: float, value: float) -> None:
    assert terminal_return(reward) == value
