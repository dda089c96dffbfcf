"""Frames, forged answers, hostile values (docs/sandbox.md, cases 20-23)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes.programs import ECHO, attack

from sandbox import EnvError, SandboxPool, SandboxSettings
from sandbox.frames import Malformed, RunnerReply, cut, pack, read_reply

BOUNDS = SandboxSettings(max_reply_bytes=1000, max_observation_bytes=100, max_output_bytes=50)


@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers(-9, 9)), max_size=5), st.integers(1, 40))
def test_frames_survive_any_cutting(messages: list[dict[str, int]], size: int) -> None:
    stream = b"".join(map(pack, messages))
    buffer, found = bytearray(), []
    for start in range(0, len(stream), size):
        buffer += stream[start : start + size]
        while (body := cut(buffer, 1000)) is not None:
            found.append(json.loads(body))
    assert found == messages
    assert not buffer


@given(st.binary(max_size=60))
def test_any_bytes_are_a_reply_or_malformed(data: bytes) -> None:
    try:
        reply = read_reply(data, 1, BOUNDS)
    except Malformed:
        return
    assert isinstance(reply, RunnerReply)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[1]",
        b"\x80\x04\x95cos\nsystem\n",
        b'{"i": 2}',
        b'{"i": true}',
        b'{"i": 1, "r": NaN}',
        b'{"i": 1, "r": Infinity}',
        b'{"i": 1, "r": 1e999}',
        b'{"i": 1, "r": 11}',
        b'{"i": 1, "r": true}',
        b'{"i": 1, "r": ' + b"9" * 500 + b"}",
        b'{"i": 1, "o": "\\ud800"}',
        b'{"i": 1, "o": "\xff"}',
        b'{"i": 1, "x": 1}',
        b'{"i": 1, "te": 1}',
        b'{"i": 1, "err": ["E", "m"]}',
        b'{"i": 1, "err": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"i": 1, "o": "' + b"x" * 101 + b'"}',
        b'{"i": 1, "out": "' + b"x" * 51 + b'"}',
        b'{"i": 1, "err": ["E", "' + b"m" * 1001 + b'", "", "step"]}',
        b'{"i": 1, "m": {"cls": "E", "turns": -1, "calls": []}}',
    ],
)
def test_what_is_not_a_reply(body: bytes) -> None:
    with pytest.raises(Malformed):
        read_reply(body, 1, BOUNDS)


def test_length_beyond_the_limit_is_refused_before_the_body() -> None:
    with pytest.raises(Malformed):
        cut(bytearray((2 << 30).to_bytes(4, "little")), 1000)


@pytest.mark.asyncio(loop_scope="module")
class TestValues:
    @pytest.mark.parametrize("answer", ["'text'", "('o', 0.0, False, {})", "('o', 11, False, False, {})"])
    async def test_answers_out_of_shape(self, pool: SandboxPool, answer: str) -> None:
        """Those that the siege shows raise as well; the phase says that the answer was at fault."""
        source = ECHO.replace('f"{self.t} {a}", 0.5, False, False, {}', answer)
        async with await pool.spawn(source) as instance:
            with pytest.raises(EnvError) as caught:
                await instance.step("go")
            assert caught.value.phase == "contract"

    async def test_tolerated_shapes(self, pool: SandboxPool) -> None:
        answer = "[None, np.float64(1), np.bool_(True), False, object()]"
        source = ECHO.replace('f"{self.t} {a}", 0.5, False, False, {}', answer)
        async with await pool.spawn(source) as instance:
            step = await instance.step("go")
        assert (step.observation, step.reward, step.terminated, step.truncated) == ("", 1.0, True, False)

    async def test_lone_surrogates_are_replaced(self, pool: SandboxPool) -> None:
        async with await pool.spawn(ECHO.replace("{a}", "\\ud800")) as instance:
            assert (await instance.step("go")).observation == "1 ?"

    async def test_exception_that_cannot_be_shown(self, pool: SandboxPool) -> None:
        body = "class Odd(Exception):\n    def __str__(self): raise self\nraise Odd"
        async with await pool.spawn(attack(body)) as instance:
            with pytest.raises(EnvError, match="cannot be shown"):
                await instance.step("go")
