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


@pytest.fixture(params=["memory", "nats"])
def world(request: pytest.FixtureRequest) -> Callable[..., AbstractAsyncContextManager[World]]:
    if request.param == "memory":
        return memory_world
    return partial(nats_world, request.getfixturevalue("nats_url"))
