from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest
from bus_worlds import World, memory_world, nats_world, plain_server


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with plain_server(tmp_path_factory.mktemp("nats")) as url:
        yield url


@pytest.fixture(params=["memory", "nats", "thread"])
def world(request: pytest.FixtureRequest) -> Callable[..., AbstractAsyncContextManager[World]]:
    if request.param == "memory":
        return memory_world
    url = request.getfixturevalue("nats_url")
    return partial(nats_world, url, own_thread=request.param == "thread")


@pytest.fixture(params=["memory", "nats"])
def plain_world(request: pytest.FixtureRequest) -> Callable[..., AbstractAsyncContextManager[World]]:
    """Like ``world`` without the thread, for what has nothing to do with it."""
    return (
        memory_world
        if request.param == "memory"
        else partial(nats_world, request.getfixturevalue("nats_url"))
    )
