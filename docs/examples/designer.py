"""A designer without a model: it answers tickets with the programs of a directory, in turn."""

import asyncio
import hashlib
import os
import sys
import time
from pathlib import Path

import msgpack
import nats


async def main(url: str, run: str, programs: list[str]) -> None:
    login = {"token": os.environ["SPADE_BUS_TOKEN"], "inbox_prefix": "_INBOX.designer"}
    client = await nats.connect(url, max_reconnect_attempts=30, error_cb=asyncio.Queue().put, **login)
    stream = client.jetstream()
    queue = await stream.pull_subscribe_bind("designer", stream=f"TASK_{run}")
    while not client.is_closed:  # as it is when the server was away for a minute: the run has ended
        try:
            (work,) = await queue.fetch(1, timeout=2)
            kind, ticket = msgpack.unpackb(work.data)[1:8:6]
            if kind != "design_ticket.v1":
                await work.nak(delay=30)  # not for us; too often handed back, it becomes a dead letter
                continue
            source = programs[ticket["slot"] % len(programs)]
            answer = {key: ticket[key] for key in ("design", "cohort", "slot", "skill")}
            answer |= {"kind": "environment_ready.v1", "attempt": 0, "source": source, "hint": None}
            answer |= {"environment": hashlib.sha256(source.encode()).hexdigest(), "document": ""}
            subject = f"spade.{run}.event.designer.ready.{answer['environment'][:16]}"
            frame = [1, answer["kind"], run, "designer", "files", time.time_ns(), 0, answer]
            headers = {"Nats-Msg-Id": f"ready:{ticket['design']}", "Nats-Expected-Stream": f"EVENT_{run}"}
            await stream.publish(subject, msgpack.packb(frame), headers=headers)
            await work.ack_sync()
        except (TimeoutError, nats.errors.Error):
            await asyncio.sleep(0.1)  # no work, or no server: unacknowledged work is delivered again


files = sorted(Path(sys.argv[3]).glob("*.py"))
asyncio.run(main(sys.argv[1], sys.argv[2], [file.read_text() for file in files]))
