"""Provisioning on a server that cannot make a store at once."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import bus
from bus import BusError
from bus.connection import ApiError

assert bus.provision
provisioning = sys.modules["bus.provision"]


class Broker:
    """Refuses with ``codes``, one after the other, then agrees."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.asked = list(codes), 0

    async def api(self, verb: str, _: dict[str, Any], **__: Any) -> dict[str, Any]:
        self.asked += 1
        if self.codes:
            raise ApiError(verb, self.codes.pop(0), "refused")
        return {}


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provisioning, "_STORE_PAUSES", (0.0, 0.0, 0.0))


@pytest.mark.parametrize("faults", [0, 1, 3])
async def test_a_store_that_cannot_be_made_is_asked_for_again(faults: int) -> None:
    broker = Broker(*[10049] * faults)
    await provisioning._ask(broker, "STREAM.CREATE.TASK_r", {}, "TASK_r")
    assert broker.asked == faults + 1


@pytest.mark.parametrize(("codes", "asked"), [([10049] * 4, 4), ([10058], 1)])
async def test_what_stays_refused_is_an_error(codes: list[int], asked: int) -> None:
    broker = Broker(*codes)
    with pytest.raises(BusError, match="the server refuses TASK_r"):
        await provisioning._ask(broker, "STREAM.CREATE.TASK_r", {}, "TASK_r")
    assert broker.asked == asked
