"""An episode outlives its server: the context is the agent's, so another server goes on where one died."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from scenes.small_run import request

from bus.messages import ServerServing, Span
from engine.config import SamplingConfig
from engine.inference.pool import InferencePool
from roles.agent.episode import Played, Player, Rules
from sandbox import StepResult

TURNS, USER, STOP = 5, 1, 2


class Chat:
    """A token a character; USER begins an observation, STOP ends a reply."""

    stop_token_ids = (STOP,)

    def first(self, content: str, system: str | None = None, tools: object = ()) -> list[int]:
        return [USER, *map(ord, content)]

    def opens_thought(self, prompt: list[int]) -> bool:
        return False

    def bridge(self, observation: str) -> list[int]:
        return [USER, *map(ord, observation)]

    def close(self) -> list[int]:
        return [STOP]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token) for token in ids if token > STOP)


class Server:
    """Answers with the number of observations it was shown, as a server of ``version`` does."""

    def __init__(self, version: int) -> None:
        self.version, self.url = version, ""
        self.prompts: list[list[int]] = []
        self._runner: Any = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.post("/inference/v1/generate", self._generate)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])

    async def kill(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def says(self, name: str) -> ServerServing:
        return ServerServing(
            server=name, epoch="1", url=self.url, version=self.version, canary_error=0.0, seconds=0.0
        )

    async def _generate(self, request: web.Request) -> web.Response:
        prompt = msgspec.json.decode(await request.read())["token_ids"]
        self.prompts.append(prompt)
        tokens = [*map(ord, f"turn \\boxed{{{prompt.count(USER)}}}"), STOP]
        choice = {
            "token_ids": tokens,
            "finish_reason": "stop",
            "logprobs": {"content": [{"token_id": one, "logprob": -0.5} for one in tokens]},
            "weight_versions": [{"version": str(self.version), "start": 0, "end": len(tokens)}],
        }
        return web.json_response({"choices": [choice]})


class Counting:
    """Won by counting the turns; ``between`` is done in the middle of the third step."""

    tools, first = False, "count"

    def __init__(self, between: Any) -> None:
        self._turn, self._between = 0, between

    async def step(self, action: str) -> StepResult:
        self._turn += 1
        assert action == str(self._turn)
        if self._turn == 3 and self._between is not None:
            await self._between()
        done = self._turn == TURNS
        return StepResult(f"next, {self._turn} done", float(done), done, False)

    async def close(self) -> None:
        pass


class Sandbox:
    def __init__(self, between: Any = None) -> None:
        self._between = between

    async def spawn(self, source: str, **_: Any) -> Counting:
        return Counting(self._between)


@asynccontextmanager
async def servers(*versions: int) -> AsyncIterator[list[Server]]:
    async with AsyncExitStack() as stack:
        found = [Server(version) for version in versions]
        for one in found:
            await one.start()
            stack.push_async_callback(one.kill)
        yield found


async def play(pool: InferencePool, sandbox: Sandbox) -> Played:
    rules = Rules(sampling=SamplingConfig(max_tokens=64), max_turns=TURNS, context_tokens=4096, prompt="nano")
    return await Player(pool, sandbox, Chat(), rules).play(request(1, max_turns=TURNS))  # type: ignore[arg-type]


def new_pool() -> InferencePool:
    return InferencePool(max_concurrency=8, request_seconds=10.0)


async def test_a_server_that_dies_between_turns_changes_the_versions_and_nothing_else() -> None:
    async with servers(4) as (alone,), new_pool() as pool:
        pool.apply(alone.says("a"))
        undisturbed = await play(pool, Sandbox())
    async with servers(4, 7) as (first, second), new_pool() as pool:
        pool.apply(first.says("a"))

        async def between() -> None:
            await first.kill()
            pool.apply(second.says("b"))  # nobody says that the first one is lost: the request finds out

        played = await play(pool, Sandbox(between))
    assert played.ending == undisturbed.ending
    assert played.ending.returned == 1.0
    assert played.transcript == undisturbed.transcript
    (whole,), (segment,) = undisturbed.segments, played.segments
    assert (segment.tokens, segment.logprobs) == (whole.tokens, whole.logprobs)
    assert [span.version for span in segment.spans] == [4] * 3 + [7] * 2
    assert [(span.start, span.stop) for span in segment.spans] == [
        (span.start, span.stop) for span in whole.spans
    ]
    assert played.versions == (4, 7)
    assert first.prompts + second.prompts == alone.prompts
    assert isinstance(segment.spans[0], Span)
