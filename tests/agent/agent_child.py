"""An agent in a process of its own, for the tests that kill it.

Run as ``python agent_child.py URL RUN INSTANCE DIRECTORY HANG`` with the token in SPADE_BUS_TOKEN.
HANG is ``never``, ``playing``
(stand still in the second turn of a play) or ``published`` (stand still between the fact of a play and its
acknowledgement); a line says when it stands still.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1] / "roles"))

from role_fakes import FakePool, FakeSandbox, make_config, make_context

from bus import Delivery, connect
from bus.messages import EpisodeFinished
from roles.agent.role import AgentRole

CALLS: list[str] = []


def counting(text: str, call: int) -> str:
    """Play the counter by what can be seen of it."""
    start = int(re.findall(r"count from (\d+)", text)[-1])
    turn = int(([0, *re.findall(r"turn (\d+)", text)])[-1])
    return f"so \\boxed{{{start + turn}}}"


async def stand_still(what: str) -> None:
    print(what, flush=True)
    await anyio.sleep_forever()


class Pool(FakePool):
    async def generate(self, prompt: Any, **given: Any) -> Any:
        if self.calls:
            await stand_still("playing")
        return await super().generate(prompt, **given)


async def main(url: str, run: str, instance: str, directory: Path, hang: str) -> None:
    token = os.environ["SPADE_BUS_TOKEN"]
    async with connect(url, run=run, role="agent", instance=instance, token=token) as bus:
        if hang == "published":
            acknowledge = Delivery.ack

            async def late(delivery: Delivery) -> None:
                assert EpisodeFinished.stream == "EVENT"
                await stand_still("published")
                await acknowledge(delivery)

            Delivery.ack = late  # type: ignore[method-assign]
        pool = (Pool if hang == "playing" else FakePool)(counting, version=3)
        context = make_context(bus, make_config(), directory, pool=pool, sandbox=FakeSandbox())  # type: ignore[arg-type]
        await AgentRole(context).run()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:4], Path(sys.argv[4]), sys.argv[5])
