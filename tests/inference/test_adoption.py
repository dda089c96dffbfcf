"""What is asked of servers that a run is to adopt, before it starts anything."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from aiohttp import web
from scenes.fake_vllm import fake_vllm

from engine.config import Config, ModelConfig, RunConfig, ServerConfig
from engine.errors import ConfigError
from engine.inference.server_checks import check_external_servers


def recipe(*urls: str, **run: Any) -> Config:
    return Config(
        run=RunConfig(name="adopting", **run),
        model=ModelConfig(path="m", max_model_len=1024),
        server=ServerConfig(urls=urls),
    )


async def test_servers_that_are_ready_pass() -> None:
    async with fake_vllm() as first, fake_vllm(context=1024) as second:
        await check_external_servers(recipe(first.url, f"{second.url}/"))
        assert first.calls["/weight_info"] == second.calls["/weight_info"] == 1


async def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"nothing answers at {url}.*Start that server first"):
            await check_external_servers(recipe(url))


async def test_another_host_asks_its_own_servers() -> None:
    await check_external_servers(recipe("http://host.invalid:8000", roles=("scorer", "learner")))


@pytest.mark.parametrize("fault", [503, "drop"])
async def test_a_server_that_is_not_ready_yet_is_left_to_its_role(fault: int | str) -> None:
    async with fake_vllm(faults={"/health": [fault, fault]}) as server:
        await check_external_servers(recipe(server.url))


async def test_something_else_is_no_server() -> None:
    runner = web.AppRunner(web.Application(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        with pytest.raises(ConfigError, match=f"{url} is no vLLM server.*HTTP 404"):
            await check_external_servers(recipe(url))
    finally:
        await runner.cleanup()


async def test_a_context_that_is_too_short_is_told_with_both_figures() -> None:
    async with fake_vllm(context=512) as server:
        with pytest.raises(ConfigError, match=r"takes 512 tokens.*max_model_len = 1024"):
            await check_external_servers(recipe(server.url))


async def test_a_server_whose_weights_nobody_may_load_is_told_the_variable() -> None:
    async with fake_vllm(faults={"/weight_info": [404]}) as server:
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            await check_external_servers(recipe(server.url))
