"""A simulated vLLM server in a process of its own: answers in vLLM's wire format after a scripted delay.

Started as ``python -m engine.bench.rollout_simulated DELAY TAIL``; says its port in a line and ends with its
standard input. ``DELAY`` is the mean in seconds (uniform from half to one and a half of it), ``TAIL`` the ids
that every answer ends with, with commas.
"""

from __future__ import annotations

import random
import sys
from functools import cache
from typing import Any

import anyio
import msgspec
from aiohttp import web

_FILLER = 20


class _Parameters(msgspec.Struct):
    max_tokens: int


class _Request(msgspec.Struct):
    sampling_params: _Parameters


_decoder = msgspec.json.Decoder(_Request)


def answer(count: int, tail: tuple[int, ...]) -> bytes:
    """Return vLLM's answer of ``count`` tokens that ends with ``tail``, as its endpoint writes it."""
    tokens = [*[_FILLER] * (count - len(tail)), *tail][-count:]
    content: list[dict[str, Any]] = [
        {"token_id": token, "token": f"token_id:{token}", "logprob": -1.25, "bytes": None, "top_logprobs": []}
        for token in tokens
    ]
    choice = {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": "length",
        "logprobs": {"content": content},
        "weight_versions": [{"version": "0", "start": 0, "end": count}],
    }
    return msgspec.json.encode({"request_id": "simulated", "choices": [choice], "prompt_logprobs": None})


def application(delay: float, tail: tuple[int, ...]) -> web.Application:
    """Return the server's routes: generation, and what the pool's keeper asks for."""
    said = cache(lambda count: answer(count, tail))
    chance = random.Random(0)

    async def generate(request: web.Request) -> web.Response:
        count = _decoder.decode(await request.read()).sampling_params.max_tokens
        await anyio.sleep(delay * chance.uniform(0.5, 1.5))
        return web.Response(body=said(count), content_type="application/json")

    async def empty(_: web.Request) -> web.Response:
        return web.Response(text="")

    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", generate), web.get("/metrics", empty)])
    return app


async def main(delay: float, tail: tuple[int, ...]) -> None:
    """Serve until standard input ends."""
    runner: Any = web.AppRunner(application(delay, tail), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        print(runner.addresses[0][1], flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    ids = tuple(int(word) for word in sys.argv[2].split(","))
    anyio.run(main, float(sys.argv[1]), ids, backend_options={"use_uvloop": True})
