"""Under which host a server that is started here is announced."""

from __future__ import annotations

import pytest

from engine.config import BusConfig, Config, ModelConfig, RunConfig, ServerConfig
from engine.inference.process import reachable_host


@pytest.mark.parametrize(
    ("listens", "bus", "announced"),
    [
        (None, "", "127.0.0.1"),
        (None, "nats://127.0.0.1:4222", "127.0.0.1"),
        ("10.1.2.3", "nats://127.0.0.1:4222", "10.1.2.3"),
        ("0.0.0.0", "", "127.0.0.1"),
        ("0.0.0.0", "nats://127.0.0.1:4222,nats://10.1.2.3:4222", "127.0.0.1"),
        ("::", "tls://localhost", "127.0.0.1"),
    ],
)
def test_a_server_is_announced_by_an_address_that_others_reach(listens, bus: str, announced: str) -> None:
    config = Config(
        run=RunConfig(name="r"),
        model=ModelConfig(path="m"),
        bus=BusConfig(url=bus),
        server=ServerConfig(args={} if listens is None else {"host": listens}),
    )
    assert reachable_host(config) in (announced, "[::1]" if "localhost" in bus else announced)
